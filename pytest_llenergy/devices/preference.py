# SPDX-License-Identifier: Apache-2.0
"""Which of several devices that would do a test should have first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_llenergy.devices.inventory import Present

#: Memory in use below which a board counts as idle. A driver without any process shows up to 45 MiB (seven
#: MIG instances, NVIDIA MIG user guide); the context of the smallest LLM takes more than this.
IDLE_BYTES = 256 * 2**20


def preferred(uuids: Sequence[str], found: Present, warm: Collection[str] = ()) -> tuple[str, ...]:
    """The order in which to try: where ranks of ours wait, idle ones, then by the memory in use.

    Equals keep their order, which is that of the environment. A device whose memory is not told comes last.
    """

    def rank(uuid: str) -> tuple[bool, float]:
        used = found.used_bytes.get(uuid)
        busy = float("inf") if used is None else float(used if used > IDLE_BYTES else 0)
        return uuid not in warm, busy

    return tuple(sorted(uuids, key=rank))
