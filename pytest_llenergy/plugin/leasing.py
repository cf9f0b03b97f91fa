# SPDX-License-Identifier: Apache-2.0
"""The devices of one test: leased, free of other users, set as the test wants them, and released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

import pytest

from pytest_llenergy import real_time
from pytest_llenergy.devices.allocation import ShortageError, request_visible, select_devices
from pytest_llenergy.devices.board_settings import (
    GpuSettings,
    SettingsRefusedError,
    apply_settings,
    parse_settings,
    restore_left_changes,
)
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.occupancy import find_own_boards, wait_until_free
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, PlanError
from pytest_llenergy.plugin.draft import Draft, draft_of
from pytest_llenergy.plugin.plan import plan_of, runs_in_ranks
from pytest_llenergy.plugin.session import RunState, state_of
from pytest_llenergy.plugin.stash import ISOLATED, is_worker, uses_energy
from pytest_llenergy.plugin.visibility import restrict_this_process, watch_visibility
from pytest_llenergy.record.record import Flag


@contextmanager
def lease_devices(item: pytest.Item, request: GpuRequest | None) -> Iterator[Lease]:
    """Lease the devices of a test until the block ends.

    Skips the test, with the reason, if the host has fewer devices than requested.

    Args:
        item: The test; its draft records the lease.
        request: Its ``gpus`` mark; None leases the CPU.

    Raises:
        DeviceError: The driver or a board does not answer, ``--energy-gpus`` names a missing GPU, or others
            hold the devices or use them after the longest wait.
        PlanError: The mark ``gpu_settings`` has an invalid value.
    """
    state, draft = state_of(item.config), draft_of(item)
    # An earlier attempt may have left them.
    draft.lease = draft.gang = draft.lease_wait_s = None
    draft.settings = ()
    state.pool.begin_test(str(item.path))
    wanted_settings = gpu_settings_of(item, plan_of(item).gpu_settings)
    draft.in_process = draft.in_process or _runs_in_process(item)
    one_process = draft.in_process or ISOLATED in item.stash
    if one_process and request is not None and request.n > (request.per_host or request.n):
        raise PlanError(
            f"@pytest.mark.{request} asks for several hosts, and the code of this test runs in one process; "
            "run it in ranks: energy(...), or the fixture workers"
        )
    if request is not None and state.settings.cluster != "local" and not one_process:
        with _lease_on_cluster(item, request, wanted_settings) as lease:
            yield lease
        return
    if (gangs := state.opened_gangs) is not None:
        gangs.give_back()
    # Code in this process may run on any device that this process sees.
    every = request is None and draft.in_process
    possible = _choose_devices(item, request, every=every)
    draft.fallback = possible.fallback
    own = state.worker_gpus.lease if state.worker_gpus is not None else None
    if possible.uuids and state.worker_gpus is not None:
        if state.worker_gpus.skip is not None:
            pytest.skip(state.worker_gpus.skip)
        if wanted_settings is None and draft.in_process and not uses_energy(item):
            # Nothing else has them, and nothing is measured.
            draft.lease = possible
            with watch_visibility(item, own or possible):
                yield possible
            return
    # Tests on different GPUs share the host, unless a meter reads all of it; a test on the CPU does not,
    # unless other workers run plain tests on GPUs of their own, which take no lock.
    beside = own is not None and is_worker(item.config)
    draft.host_exclusive = (not possible.uuids or every or state.measures_host) and not beside
    host = (DeviceLock(CPU, shared=not draft.host_exclusive),) if possible.uuids else ()
    with _record_wait(item) as show:
        lease = state.keeper.lease(possible, state.lease_timeout, item.nodeid, host, show)
    try:
        draft.lease = lease
        with _record_wait(item) as show:
            _wait_until_free(lease, state, draft, show)
        with ExitStack() as stack:
            stack.enter_context(change_boards(item, lease, wanted_settings))
            if draft.in_process and request is not None:
                stack.enter_context(restrict_this_process(item, lease, own))
            yield lease
    finally:
        state.keeper.finish_test()


def _choose_devices(item: pytest.Item, request: GpuRequest | None, *, every: bool) -> Lease:
    """Return what the test may use: its mark's, for ``every`` all visible GPUs, else the CPU."""
    state = state_of(item.config)
    try:
        if state.worker_gpus is not None and (every or request is not None):
            return state.worker_gpus.lease if request is None else state.worker_gpus.choose(request)
        if every:
            request, flags = request_visible(state.settings.gpus, state.environment)
            draft_of(item).flags += flags
        allowed = state.allowed_gpus(item, request)
        return select_devices(request, allowed, state.environment, state.warm)
    except ShortageError as error:
        # The only reason that is not a mistake: this host has fewer GPUs.
        pytest.skip(str(error))


@contextmanager
def _record_wait(item: pytest.Item) -> Iterator[Callable[[str], None]]:
    """Show the progress of a wait, and add its length to the draft, also if it fails."""
    draft, start_s = draft_of(item), real_time.monotonic()
    try:
        yield state_of(item.config).progress.track(item.nodeid, waits=True)
    finally:
        draft.lease_wait_s = (draft.lease_wait_s or 0.0) + real_time.monotonic() - start_s


@contextmanager
def _lease_on_cluster(
    item: pytest.Item, request: GpuRequest, wanted_settings: GpuSettings | None
) -> Iterator[Lease]:
    """Lease devices on hosts of ``--energy-cluster`` until the block ends.

    Skips the test, with the reason, if the cluster cannot provide them.
    """
    from pytest_llenergy.hosts.gangs import BusyBoardsError
    from pytest_llenergy.hosts.launchers import NeverError

    state, draft = state_of(item.config), draft_of(item)
    gangs = state.gangs
    assert gangs is not None
    draft.host_exclusive = state.measures_host
    try:
        with _record_wait(item) as show:
            draft.gang = gangs.lease(request, item.nodeid, exclusive=draft.host_exclusive, on_wait=show)
    except NeverError as error:
        if request.fallback != CPU:
            pytest.skip(str(error))
    except BusyBoardsError as error:
        if state.settings.busy != "skip":
            raise
        pytest.skip(str(error))
    try:
        if draft.gang is None:
            draft.fallback = CPU
            lease = Lease(devices=(CPU,) * request.n, fallback=CPU)
            draft.host_exclusive = True
            draft.lease = state.keeper.lease(lease, state.settings.lease_timeout, item.nodeid)
        else:
            draft.lease = draft.gang.lease
            draft.flags += draft.gang.flags
        with change_boards(item, draft.lease, wanted_settings):
            yield draft.lease
    finally:
        state.keeper.finish_test()
        gangs.finish_test()


@contextmanager
def change_boards(item: pytest.Item, lease: Lease, settings: GpuSettings | None) -> Iterator[None]:
    """Restore what killed runs left on the leased boards, then apply the settings of the test, if any.

    Skips the test, with the reason, if the boards, the driver or the user's rights allow no change.

    Raises:
        DeviceError: A board cannot be changed or restored.
    """
    state, gang = state_of(item.config), draft_of(item).gang
    if gang is not None:
        # The agents have restored theirs.
        if settings is not None:
            pytest.skip(
                "@pytest.mark.gpu_settings needs --energy-cluster=local: it changes GPUs of this host"
            )
        yield
        return
    with ExitStack() as stack:
        directory = stack.enter_context(closing(open_lock_directory(state.environment)))
        restore_left_changes(directory, lease.uuids)
        if settings is not None:
            applying = apply_settings(settings, lease, directory, state.pool.descriptors)
            try:
                draft_of(item).settings = stack.enter_context(applying)
            except SettingsRefusedError as error:
                pytest.skip(str(error))
        yield


def gpu_settings_of(item: pytest.Item, values: Mapping[str, object] | None) -> GpuSettings | None:
    """Return the settings that a mark ``gpu_settings`` asks for, with the parameters of its test.

    Raises:
        PlanError: A value is invalid, or the test lacks the parameter that it names.
    """
    if values is None:
        return None
    callspec = getattr(item, "callspec", None)
    try:
        return parse_settings(values, callspec.params if callspec is not None else {})
    except PlanError as error:
        raise PlanError(f"@pytest.mark.gpu_settings: {error}") from None


def falls_back(item: pytest.Item, request: GpuRequest) -> bool:
    """Return whether a test will get the CPU, as its mark allows, since this host has too few GPUs."""
    if request.fallback is None:
        return False
    state = state_of(item.config)
    return select_devices(request, state.allowed_gpus(item, request), state.environment).fallback is not None


def _runs_in_process(item: pytest.Item) -> bool:
    """Whether the code of a test runs in this process, measured or on leased GPUs, instead of in ranks."""
    plan = plan_of(item)
    if ISOLATED in item.stash or runs_in_ranks(plan, getattr(item, "fixturenames", ())):
        return False
    return uses_energy(item) or plan.gpus is not None


def _wait_until_free(lease: Lease, state: RunState, draft: Draft, show: Callable[[str], None]) -> None:
    """Wait for processes that use the leased GPUs without a lease."""
    settings = state.settings
    allowed = state.servers if lease.uuids else ()
    occupancy = wait_until_free(lease.uuids, settings.busy_timeout, allowed, show)
    draft.flags += occupancy.flags
    if occupancy.state == "busy":
        if settings.busy == "skip":
            pytest.skip(occupancy.message)
        raise DeviceError(occupancy.message)
    if state.worker_gpus is not None and draft.in_process:
        draft.flags += _find_contexts(lease)


def _find_contexts(lease: Lease) -> list[Flag]:
    """Return a flag if earlier tests of this process have opened GPUs that a test does not measure."""
    others = find_own_boards() - {*lease.uuids, *lease.divided}
    detail = (
        f"{', '.join(sorted(others))}: pytest's process has a context there, which this test does not measure"
    )
    return [Flag(name="gpu-processes", severity="warning", detail=detail)] if others else []


def lease_first(item: pytest.Function, fixture: str) -> None:
    """Move the lease fixture before every function-scoped fixture of a test.

    Fixtures that start something on the devices are then set up after the lease and torn down before it ends.
    """
    # A new list, since all tests of a function share one.
    names = [name for name in item.fixturenames if name != fixture]
    first = next((place for place, name in enumerate(names) if _is_function_scoped(item, name)), len(names))
    item.fixturenames = [*names[:first], fixture, *names[first:]]


def _is_function_scoped(item: pytest.Function, name: str) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return not definitions or definitions[-1].scope == "function"
