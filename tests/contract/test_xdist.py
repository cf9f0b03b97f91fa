# SPDX-License-Identifier: Apache-2.0
"""Runs with pytest-xdist: one record for each test, one report, nothing lost with a worker."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.nvml_sim import Board

from .conftest import GiveBoards
from .project import Outcome, Project, wait_for

pytest.importorskip("xdist")

SUITE = """
import os, time
import pytest

@pytest.mark.gpus(1)
@pytest.mark.parametrize("size", range(4))
def test_gpu(energy_meter, gpus, size):
    energy_meter.extra_info["worker"] = os.environ["PYTEST_XDIST_WORKER"]
    with energy_meter("w"):
        time.sleep(0.2)

@pytest.mark.parametrize("size", range(2))
def test_cpu(workers, size):
    assert workers.run(os.getpid) != [os.getpid()]

def test_fails(energy_meter):
    assert False, "on purpose"

def test_plain():
    pass
"""


@pytest.fixture(scope="module")
def ran(module_project: Project, give_boards: GiveBoards) -> tuple[Project, Outcome]:
    module_project.plugin("xdist")
    module_project.without_torch()
    give_boards(module_project, [Board(latch_ns=20_000_000), Board(latch_ns=20_000_000)])
    module_project.write("test_some.py", SUITE)
    return module_project, module_project.pytest("-n2", "--energy-report")


def test_each_measured_test_has_one_record_in_one_report(ran: tuple[Project, Outcome]) -> None:
    project, outcome = ran
    outcome.check(passed=7, failed=1)
    report = project.report()
    assert (report["run"]["complete"], report["run"]["exit_status"]) == (True, 1)
    names = sorted(record["id"] for record in report["records"])
    assert names == sorted([f"test_some.py::test_gpu[{n}]" for n in range(4)] + ["test_some.py::test_fails"])
    assert sorted(path.name for path in project.path.glob("energy*")) == ["energy.json"]
    assert len(re.findall("=+ energy =+", outcome.out)) == 1
    assert len(re.findall("energy report: energy.json", outcome.out)) == 1


def test_workers_had_different_boards_at_a_time(ran: tuple[Project, Outcome]) -> None:
    records = [each for name, each in ran[0].records().items() if name.startswith("test_gpu")]
    assert all(each["status"] == "measured" for each in records)
    spans = []
    for record in records:
        (window,) = record["windows"]
        start_s = window["start_s"]
        spans.append((record["devices"][0], start_s, start_s + window["duration_s"]))
    for number, (device, start_s, end_s) in enumerate(spans):
        for other, other_start_s, other_end_s in spans[:number]:
            assert device != other or end_s <= other_start_s or other_end_s <= start_s


def test_a_worker_that_dies_loses_no_finished_test(project: Project) -> None:
    project.plugin("xdist")
    project.write(
        "test_dies.py",
        "import os, time\n"
        "def test_1(energy): energy(time.sleep, 0.02)\n"
        "def test_2(energy):\n    energy(time.sleep, 0.02)\n    os._exit(1)\n"
        "def test_3(energy): energy(time.sleep, 0.02)\n",
    )
    ended = project.pytest("-n1", "--energy-report", project.meter())
    assert ended.ret == 1
    found = {name: each["status"] for name, each in project.records().items()}
    # On a busy machine its meter may be read too late for rounds of 20 ms.
    assert {found["test_1"], found["test_3"]} <= {"measured", "invalid"}
    assert found["test_2"] == "crashed"
    assert project.records()["test_2"]["reason"]


def test_nothing_is_left_after_ctrl_c_and_kill_9(project: Project) -> None:
    project.plugin("xdist")
    project.without_torch()
    project.write(
        "test_endless.py",
        "import os, time\nimport pytest\n"
        "def work():\n    open(f'running-{os.getpid()}', 'w').close()\n    time.sleep(600)\n"
        "def test_1(energy): energy(time.sleep, 0.02)\n"
        "def test_2(workers): workers.run(work)\n",
    )
    for number in (signal.SIGINT, signal.SIGKILL):
        for path in project.path.glob("running-*"):
            path.unlink()
        process = project.start_pytest("-n2", "--energy-report", project.meter())
        wait_for(lambda: list(project.path.glob("running-*")))
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.communicate(timeout=200)
        assert project.survivors() == {}


def test_a_benchmark_or_gate_runs_in_workers_too(project: Project) -> None:
    project.plugin("xdist")
    project.write(
        "test_gate.py",
        "import pytest, time\n@pytest.mark.energy_gate(budget='1 uJ')\n"
        "def test_it(energy): energy(time.sleep, 0.1)\n",
    )
    ended = project.pytest("-n1", project.meter())
    assert ended.ret == 1
    assert "energy_gate" in ended.out or "1 uJ" in ended.out or "budget" in ended.out
