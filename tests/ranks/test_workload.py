# SPDX-License-Identifier: Apache-2.0
"""What ranks report besides their timeline: their peak memory."""

from __future__ import annotations

from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.workload import call_workload

from .groups import plan

MIB = 1 << 20


def test_each_rank_has_its_own_peak_memory(hosts: dict[str, Host]) -> None:
    """Rank 0 touches 16 MiB, rank 1 touches 16 MiB and 48 more: that is what they differ by."""
    ranks = RankGroup(plan(2), hosts)

    def touch(megabytes: list[int]) -> int:
        import os

        return len(bytearray(b"x") * (megabytes[int(os.environ["RANK"])] * 1024 * 1024))

    try:
        workload = call_workload(ranks, touch, ([16, 16],), {}, 60)
        workload.run_round()
        alike = list(workload.rank_peak_memory_bytes)
        workload = call_workload(ranks, touch, ([16, 64],), {}, 60)
        workload.run_round()
        first, second = workload.rank_peak_memory_bytes
        assert workload.results() == [16 * MIB, 64 * MIB]
    finally:
        ranks.close()
    assert alike[0] is not None
    assert alike[1] is not None
    assert first is not None
    assert second is not None
    more = (second - first) - (alike[1] - alike[0])
    assert abs(more - 48 * MIB) < 4 * MIB
    assert workload.peak_memory_bytes == first + second
