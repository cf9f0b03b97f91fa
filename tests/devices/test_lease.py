# SPDX-License-Identifier: Apache-2.0
"""The locks that a lease requests."""

from __future__ import annotations

from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease, LockRequest, join_leases
from pytest_llenergy.record.environment import Board


class TestClaims:
    def test_a_cpu_lease_claims_the_cpu_once(self) -> None:
        assert Lease((CPU, CPU)).locks == (DeviceLock(CPU),)

    def test_an_instance_claims_itself_and_shares_its_board(self) -> None:
        assert Lease(("MIG-a",), divided=("GPU-b",)).locks == (
            DeviceLock("MIG-a"),
            DeviceLock("GPU-b", shared=True),
        )

    def test_instances_of_one_board_do_not_conflict_but_conflict_with_the_whole_board(self) -> None:
        first, second = (LockRequest(Lease((part,), divided=("GPU-b",)).locks) for part in ("MIG-a", "MIG-b"))
        assert not first.conflicts_with(second.always)
        assert first.conflicts_with((DeviceLock("GPU-b"),))
        assert LockRequest((DeviceLock("GPU-b"),)).conflicts_with(second.always)

    def test_choices_are_requested_and_those_taken_are_joined(self) -> None:
        each = [one(index) for index in range(3)]
        possible = Lease(("GPU-0", "GPU-1"), choices=tuple(each))
        assert possible.request() == LockRequest(
            (), 2, tuple((DeviceLock(f"GPU-{index}"),) for index in range(3))
        )
        assert possible.select((0, 2)) == join_leases([each[0], each[2]])
        assert possible.select((0, 2)).indices == (0, 2)

    def test_additional_locks_are_requested_with_the_devices(self) -> None:
        assert Lease(("GPU-0",)).request((DeviceLock(CPU),)).always == (DeviceLock("GPU-0"), DeviceLock(CPU))


def one(index: int) -> Lease:
    return Lease((f"GPU-{index}",), (Board(f"GPU-{index}", "X", str(index)),), (index,))
