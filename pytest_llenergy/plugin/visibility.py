# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the code of a test in one process sees: set for its lease, and checked again after its fixtures.

The process of an isolated test imports this module, so it imports little.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.visibility import visible_variables
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.plugin.stash import GIVEN_LEASE

#: The lease to which this process is restricted while a test runs in it.
RESTRICTED = pytest.StashKey[Lease]()


@contextmanager
def restrict_this_process(item: pytest.Item, lease: Lease, own: Lease | None = None) -> Iterator[None]:
    """Let code in this process use only the leased GPUs until the block ends.

    ``CUDA_VISIBLE_DEVICES`` has an effect only until CUDA is initialised. After that, the contexts of this
    process are compared with the lease; those that earlier tests opened on its ``own`` GPUs stay.

    Raises:
        DeviceError: At the start or end of the block this process uses a GPU that is not leased.
    """
    from pytest_llenergy.devices.occupancy import find_own_boards

    kept = find_own_boards() & {*own.uuids, *own.divided} if own is not None else set()

    def check_contexts() -> None:
        if other := find_own_boards() - {*lease.uuids, *lease.divided, *kept}:
            raise DeviceError(
                f"this process uses {', '.join(sorted(other))}, but the test has leased "
                f"{lease.visible_devices or CPU}; CUDA keeps the GPUs that it saw first: run the work in "
                "ranks (fixture workers), or each test in a pytest process of its own"
            )

    check_contexts()
    shown = own or lease
    with pytest.MonkeyPatch.context() as patch:
        for name, value in visible_variables(shown.uuids).items():
            patch.setenv(name, value)
        with watch_visibility(item, shown):
            yield
    check_contexts()


@contextmanager
def watch_visibility(item: pytest.Item, lease: Lease) -> Iterator[None]:
    """Let ``check_visibility`` compare with this lease until the block ends."""
    item.stash[RESTRICTED] = lease
    try:
        yield
    finally:
        del item.stash[RESTRICTED]


def check_visibility(item: pytest.Item) -> None:
    """Check that a test, or a fixture, has not changed which GPUs its process sees.

    Raises:
        DeviceError: A variable differs from the lease.
    """
    lease = item.stash.get(RESTRICTED, item.config.stash.get(GIVEN_LEASE, None))
    if lease is None:
        return
    for name, given in visible_variables(lease.uuids).items():
        if (now := os.environ.get(name)) != given:
            # The next test of this process is not to fail for it.
            os.environ[name] = given
            raise DeviceError(
                f"{name} was {given!r}, as the test has leased, and is now {now!r}: "
                "a fixture or the test changes it; remove that, or the mark gpus"
            )
