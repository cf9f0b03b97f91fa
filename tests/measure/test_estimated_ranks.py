# SPDX-License-Identifier: Apache-2.0
"""The estimate of busy loops of known CPU time on real ranks, beside busy neighbours."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.estimate import AVERAGE_W
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.workload import call_workload

from ..energy.test_cpu_time import neighbours
from ..ranks.groups import PLAIN, start
from .marks import measure

pytestmark = pytest.mark.clock

LOOP_S = 0.5


def spin_in_rank(loop_s: float) -> None:
    import time

    end_s = time.thread_time() + loop_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(("ranks", "beside"), [(1, 0), (2, 1), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_the_joules_are_those_of_the_ranks_whatever_runs_beside_them(ranks: int, beside: int) -> None:
    host = LocalHost("spawn")
    group = start(host, ranks, PLAIN)
    selection = open_meters(["estimate"], MeterRegistry(), Targets())
    try:
        workload = call_workload(group, spin_in_rank, (LOOP_S,), {}, 120.0)
        plan = RoundPlan(rounds=2, warmup=0, gap_s=0.25, target=0.02, budget_s=0.0)
        with neighbours(beside):
            experiment = measure(workload, plan, selection, Lease(("cpu",) * ranks))
    finally:
        group.close()
        host.close()
    for each in experiment.rounds:
        assert each.energy_j == pytest.approx(AVERAGE_W * LOOP_S * ranks, rel=0.03)
