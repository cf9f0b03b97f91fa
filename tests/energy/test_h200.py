# SPDX-License-Identifier: Apache-2.0
"""The energy counter of a real H200, replayed: ticks, jitter and overshoot as recorded (docs/validation)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pytest_llenergy.energy.host_window import account_window, window_record
from pytest_llenergy.energy.meters.base import Domain, within
from pytest_llenergy.energy.meters.nvml import GAIN_LIMIT, OFFSET_LIMIT_W, TAIL_S

from .watching import Machine, Spell, run_reader
from .waves import EPOCH, S

RECORDING = Path(__file__).parents[2] / "docs" / "validation" / "nvidia-h200.npz"

#: Seconds of idle time beside a load that stands alone.
ALONE_S = 1.0

#: CPU time of a reading of the counter (ns): on a fast driver, and on that machine.
READ_NS = (25_000, 2_800_000)


class RecordedCounter:
    """A meter that shows the recorded counter of each moment."""

    name = "nvml"
    poll_period_s = 0.01

    def __init__(self, machine: Machine, read_ns: int, raw: Any) -> None:
        self._machine, self._read_ns = machine, read_ns
        self._moments, self._joules = raw["counter_s"], raw["counter_j"]
        domain = Domain(
            name="gpu:h200",
            kind="measured",
            source="NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            scope="board",
            resolution_j=0.001,
            tail_s=TAIL_S,
            accuracy="",
            limits=within(GAIN_LIMIT, OFFSET_LIMIT_W),
            update_period_s=0.1,
            max_age_s=None,
            highest_w=700.0,
        )
        self.domains: Sequence[Domain] = (domain,)

    def read(self) -> list[float | str]:
        self._machine.work(self._read_ns // 2)
        moment = (self._machine.now_ns - EPOCH) / S
        self._machine.work(self._read_ns // 2)
        return [float(self._joules[max(0, np.searchsorted(self._moments, moment, side="right") - 1)])]

    def close(self) -> None:
        """Do nothing."""


def true_j(raw: Any, start_s: float, end_s: float) -> float:
    """Return the energy of a load between idle times: what the counter shows less idle power around it."""
    moments, joules = raw["counter_s"], raw["counter_j"]
    first, last = np.searchsorted(moments, (start_s - ALONE_S / 2, end_s + ALONE_S / 2))
    before_w, after_w = (
        (joules[b] - joules[a]) / (moments[b] - moments[a]) for a, b in ((first - 5, first), (last, last + 5))
    )
    idle_j = before_w * (start_s - moments[first]) + after_w * (moments[last] - end_s)
    return float(joules[last] - joules[first] - idle_j)


@pytest.mark.parametrize("read_ns", READ_NS)
@pytest.mark.parametrize("seed", range(6))
def test_bursts_have_the_energy_that_the_counter_shows_between_idle_times(read_ns: int, seed: int) -> None:
    """Bursts above the power limit, of a third of a second, are neither refused nor wrong."""
    with np.load(RECORDING) as raw:
        raw = dict(raw)
    borders = [0.0, *raw["load_s"].ravel(), np.inf]
    alone = [
        (start_s, end_s)
        for before_s, start_s, end_s, after_s in zip(
            borders[0::2], borders[1::2], borders[2::2], borders[3::2], strict=False
        )
        if start_s - before_s > ALONE_S and after_s - end_s > ALONE_S
    ]
    assert len(alone) == 5
    edges = [(EPOCH + round(start_s * S), EPOCH + round(end_s * S)) for start_s, end_s in alone]
    machine = Machine(EPOCH + S // 10)
    spells = [Spell(*edge, at_work=True) for edge in edges]
    meter = RecordedCounter(machine, read_ns, raw)
    series = run_reader(machine, [meter], Random(seed), edges[-1][1] + S, spells)
    for span, edge in zip(alone, edges, strict=True):
        found = window_record("", *edge, [account_window([series], *edge, [], [])])
        assert found.energy_j is not None, found.reason
        assert found.energy_u_j is not None
        assert abs(found.energy_j - true_j(raw, *span)) <= 2 * found.energy_u_j
        # Where readings are dear, a window of three ticks may see one of them.
        assert found.energy_u_j < (0.2 if read_ns == READ_NS[0] else 0.6) * found.energy_j
