# SPDX-License-Identifier: Apache-2.0
"""Replace the measurement in the sessions of a ``Project``: joules as its ``work.py`` states them."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.host_meters import close_all
from pytest_llenergy.plugin.handles import energy
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import MeterInfo, Procedure, Round

SPREAD = (1, 1.002, 0.997, 1.001, 0.998, 1.002)
METER = MeterInfo(
    name="known",
    domain="cpu:known",
    kind="measured",
    source="known",
    scope="test",
    update_period_s=0.1,
    resolution_j=0.001,
    accuracy="exact",
)
PROCEDURE = Procedure(
    warmup_iterations=0,
    settled=None,
    criterion="none",
    iterations=1,
    gap_s=0.1,
    target=0.02,
    budget_s=1.0,
    measuring_s=2.0,
    reached=None,
)


def install(work: Any) -> None:
    """Measure ``work.joules`` after each call, with a little spread by session and round."""

    def measure(workload: Any, plan: Any, hosts: Any, *_: Any, **__: Any) -> Experiment:
        close_all(hosts)
        work.joules = 10.0
        workload.work(1)
        match = re.search(r"(\d+)-(?:base|head)", os.environ["LLENERGY_AB_SESSION"])
        assert match is not None
        number = int(match.group(1))
        # In one of several comparisons, the head may draw more for no reason.
        part = re.search(r"sessions-(\d+)/\d+-head", os.environ["LLENERGY_AB_SESSION"])
        factor = getattr(work, "FACTORS", {}).get(int(part.group(1)), 1.0) if part else 1.0
        rounds = [
            Round(
                start_s=number + each,
                duration_s=2.0,
                energy_j=factor * work.joules * SPREAD[(number + each) % len(SPREAD)],
                energy_u_j=0.001,
                energy_u_absolute_j=0.1,
            )
            for each in range(plan.rounds)
        ]
        procedure = msgspec.structs.replace(PROCEDURE, **getattr(work, "PROCEDURE", {}))
        return Experiment(rounds, compute_metrics(rounds, None), [METER], 0.1, procedure, [])

    setattr(energy, "measure_on_hosts", measure)  # noqa: B010
