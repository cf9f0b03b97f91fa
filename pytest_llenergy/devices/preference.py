# SPDX-License-Identifier: Apache-2.0
"""Which of several devices that would do a test should have first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_llenergy.devices.inventory import Present

#: Memory in use below which a board counts as free of others. A driver without any process shows up to
#: 45 MiB (seven MIG instances, NVIDIA MIG user guide); the context of the smallest LLM takes more than this.
IDLE_BYTES = 256 * 2**20

#: Boards without any process differ by so much at most. A process on a board takes more.
SPREAD_BYTES = 16 * 2**20


def preferred(uuids: Sequence[str], found: Present, warm: Collection[str] = ()) -> tuple[str, ...]:
    """The order in which to try: where ranks of ours wait, then by the memory in use.

    Those within ``SPREAD_BYTES`` of the least are equals, and equals keep their order, which is that of the
    environment. A device whose memory is not told comes last.
    """
    told = [used for used in map(found.used_bytes.get, uuids) if used is not None]
    equal_bytes = min(told, default=0) + SPREAD_BYTES

    def rank(uuid: str) -> tuple[bool, float]:
        used = found.used_bytes.get(uuid)
        return uuid not in warm, float("inf") if used is None else max(used, equal_bytes)

    return tuple(sorted(uuids, key=rank))
