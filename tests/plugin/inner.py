# SPDX-License-Identifier: Apache-2.0
"""Source of inner test suites, a measurement without waiting, and edits of reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.host_meters import HostMeters, close_all
from pytest_llenergy.measure.round_plan import RoundPlan, StepCallback
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Round

from ..conftest import TEN_WATTS
from ..record.reports import RECORD

#: Source of a conftest with a meter whose power and kind are set by the variables WATTS and KIND. It is that
#: of a GPU, since other tests that run meanwhile have no effect on GPUs.
WATTS_FROM_ENV = (
    TEN_WATTS.replace("10 * time", "float(os.environ['WATTS']) * time")
    .replace('"measured"', "os.environ['KIND']")
    .replace("poll_period_s = 0.01", "poll_period_s = 0.003")
    .replace('"cpu:ten"', '"gpu:ten"')
)


ONE = """
import time, pytest
def test_a(energy):
    energy(time.sleep, 0.05)
"""


#: The same with a mark to fill in.
MARKED = ONE.replace("def test_a", "@pytest.mark.{}\ndef test_a")


TWO = ONE + ONE.replace("test_a", "test_b")


#: Source of a hook that reruns a failed test once, at ten watts.
RERUNS = """
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for item.execution_count in (1, 2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = item.execution_count == 1 and any(report.failed for report in reports)
        for report in reports:
            if again and report.failed:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
        if not again:
            break
        os.environ["WATTS"] = "10"
        item._initrequest()
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


COMPARE = "--energy-compare=base.json"


FAIL = "--energy-fail-on=mean_power_w:3%"


def fake_measure(
    workload: Workload,
    plan: RoundPlan,
    hosts: Sequence[HostMeters],
    on_step: StepCallback,
    load_s: float,
    slo: Slo | None,
    on_failure: Callable[[Experiment], None],
) -> Experiment:
    """Replace ``measure_on_hosts``: return rounds of a device that draws the power WATTS, at once."""
    close_all(hosts)
    joules = [float(os.environ["WATTS"]) * 2.0 * each for each in (1, 1.002, 0.997, 1.001, 0.998, 1.002)]
    rounds = [
        Round(start_s=0.0, duration_s=2.0, energy_j=each, energy_u_j=0.001, energy_u_absolute_j=0.1)
        for each in joules[: plan.rounds]
    ]
    kind = os.environ["KIND"]
    meters = [msgspec.structs.replace(RECORD.meters[0], domain="cpu:ten", kind=kind)]
    assert RECORD.procedure is not None
    return Experiment(rounds, compute_metrics(rounds, None), meters, 0.1, RECORD.procedure, [])


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    report = json.loads(Path(name).read_text())
    change(report)
    Path(name).write_text(json.dumps(report))


def with_b(report: dict[str, Any]) -> None:
    """Copy the record of ``test_a`` as ``test_b``."""
    (record,) = report["records"]
    report["records"].append({**record, "id": record["id"].replace("test_a", "test_b")})


def usage_error(pytester: pytest.Pytester, *args: str) -> str:
    pytester.makepyfile(test_some="raise SystemExit('collected')")
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.stderr.lines if line.startswith("ERROR: ")]
    return line.removeprefix("ERROR: ")
