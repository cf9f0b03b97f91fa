# SPDX-License-Identifier: Apache-2.0
"""The devices of one test: chosen, locked, looked at, and given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pytest_llenergy import marks
from pytest_llenergy.devices.allot import allot, every_visible
from pytest_llenergy.devices.busy import wait_until_free
from pytest_llenergy.devices.claims import CPU, Claim
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.shortage import ShortageError
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.marked import read_mark
from pytest_llenergy.recorder import Draft, draft_of
from pytest_llenergy.state import State, state_of


@contextmanager
def leased(item: pytest.Item) -> Iterator[Lease]:
    """What a test asks for, its own until the block ends.

    Skips the test, with the reason, where there are fewer devices than it asks for. Raises ``DeviceError``
    when the driver or a board does not answer or ``--energy-gpus`` names what is not there, and when others
    still hold the devices after ``--energy-lease-timeout``, or use them after ``--energy-busy-timeout``.
    """
    state, draft = state_of(item.config), draft_of(item)
    wanted = draft.asked = read_mark(item, marks.gpus)
    # An earlier attempt may have had one.
    draft.lease = None
    try:
        # Without a mark, code in this process has what this process may use.
        here = wanted is None and draft.runs_here
        asked = every_visible(state.settings.gpus, state.environment) if here else wanted
        possible = allot(asked, state.settings.gpus, state.environment, warm=state.warm)
    except ShortageError as error:
        # The one reason that is nobody's mistake: this host has fewer GPUs. The record says so.
        pytest.skip(str(error))
    draft.fallback = possible.fallback
    if possible.uuids:
        state.warn_uncoordinated()
    draft.host_exclusive = not possible.uuids or state.measures_host
    # A test on GPUs is not alone on the host, except where a meter reads all of it; one on the CPU is.
    host = (Claim(CPU, shared=not draft.host_exclusive),) if possible.uuids else ()
    began_s = time.monotonic()
    try:
        with state.progress.of(item.nodeid) as tell:
            lease = state.keeper.take(possible, state.settings.lease_timeout, item.nodeid, host, tell)
    finally:
        # Also of a test that has waited in vain.
        draft.lease_wait_s = time.monotonic() - began_s
    try:
        draft.lease, draft.lease_intact = lease, state.keeper.intact
        with state.progress.of(item.nodeid) as tell:
            _await_others(lease, state, draft, tell)
        yield lease
    finally:
        state.keeper.leave()


def lease_first(item: pytest.Function, fixture: str) -> None:
    """Put the fixture of the lease before everything that is set up for this test alone.

    It is then torn down after all that: what another one starts on the devices must neither come before the
    lease nor outlive it.
    """
    # All tests of a function share one list.
    names = [name for name in item.fixturenames if name != fixture]
    first = next((place for place, name in enumerate(names) if _is_for_one_test(item, name)), len(names))
    item.fixturenames = [*names[:first], fixture, *names[first:]]


def _is_for_one_test(item: pytest.Function, name: str) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.get(name)
    return not fixtures or fixtures[-1].scope == "function"


def _await_others(lease: Lease, state: State, draft: Draft, tell: Callable[[str], None]) -> None:
    """Those who are on the boards without having asked for them."""
    settings = state.settings
    own = state.servers if lease.uuids else ()
    seen = wait_until_free(lease.uuids, settings.busy_timeout, own, tell=tell)
    draft.lease_wait_s = (draft.lease_wait_s or 0.0) + seen.waited_s
    draft.flags += seen.flags
    if seen.state == "busy":
        if settings.busy == "skip":
            # Only where the user asked for that; by default it is an error.
            pytest.skip(seen.message)
        raise DeviceError(seen.message)
