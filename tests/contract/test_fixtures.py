# SPDX-License-Identifier: Apache-2.0
"""The fixtures ``energy``, ``energy_meter``, ``workers`` and ``gpus`` as tests of users use them."""

from __future__ import annotations

import pytest

from .project import Ended, Project

SUITE = """
import asyncio, math, os, time
import pytest
from pytest_llenergy.api import Call, Energy, EnergyMeter, Run, Workers

def test_run(energy: Energy):
    run = energy(time.sleep, 0.2)
    assert isinstance(run, Run)
    assert run.energy_j == run.metrics["energy_j"].value > 0
    assert run.metrics["energy_j"].unit == "J"
    assert run.duration_s >= 0.2
    assert [round.energy_j > 0 and round.duration_s >= 0.2 for round in run.rounds] == [True] * 2

def test_result(energy):
    assert energy(sorted, [3, 1, 2]).result == [1, 2, 3]

def test_keywords(energy):
    assert energy(sorted, [1, 3, 2], reverse=True).result == [3, 2, 1]

def test_twice(energy):
    energy(time.sleep, 0.01)
    energy(time.sleep, 0.01)

def test_not_callable(energy):
    energy(3)

def test_metric_without_value(energy):
    run = energy(time.sleep, 0.01)
    run.energy_per_output_token_j

def test_unknown_metric(energy):
    energy(time.sleep, 0.01).energy_in_calories

def test_work_that_raises(energy):
    energy(lambda: 1 / 0)

def test_pedantic(energy):
    calls = []
    def setup():
        calls.append("setup")
        return ([2, 1],), {}
    def target(values):
        calls.append("call")
        return sorted(values)
    run = energy.pedantic(target, setup=setup, rounds=3, warmup_rounds=1)
    assert calls == ["setup", "call"] * 4
    assert len(run.rounds) == 3
    assert run.result == [1, 2]

def test_pedantic_iterations(energy):
    calls = []
    run = energy.pedantic(lambda: (calls.append(1), time.sleep(0.02)), rounds=2, iterations=7)
    assert len(calls) == 14
    for name in ("energy_j", "duration_s"):
        assert run.metrics[name].value == pytest.approx(sum(getattr(each, name) for each in run.rounds) / 14)

def test_own_values(energy):
    energy(time.sleep, 0.01)
    energy.extra_info["note"] = {"a": [1, None, "ü"]}
    energy.metric("overlap", [0.5, 0.7], better="more", unit="share")

def test_value_that_json_cannot_hold(energy):
    energy(time.sleep, 0.01)
    energy.extra_info["note"] = object()

def test_own_metric_with_the_name_of_another(energy):
    energy(time.sleep, 0.01)
    energy.metric("energy_j", 1.0, better="less")

def test_windows(energy_meter: EnergyMeter):
    with energy_meter("outer") as outer:
        with energy_meter("inner") as inner:
            time.sleep(0.3)
        time.sleep(0.3)
    assert outer.duration_s > inner.duration_s >= 0.3
    assert outer.start_s <= inner.start_s
    assert outer.energy_j > inner.energy_j > 0
    assert outer.energy_u_absolute_j >= outer.energy_u_j > 0
    (domain,) = outer.by_domain.values()
    assert (domain.kind, domain.energy_j) == ("measured", outer.energy_j)

def test_begin_and_end(energy_meter):
    energy_meter.begin("a")
    time.sleep(0.1)
    window = energy_meter.end("a")
    assert window.energy_j > 0

def test_end_without_begin(energy_meter):
    energy_meter.end("never begun")

def test_async(energy_meter):
    async def main():
        async with energy_meter("a") as window:
            await asyncio.sleep(0.1)
        await window.settled()
        assert window.ended and window.energy_j > 0
    asyncio.run(main())

def test_open_window_has_no_energy_yet(energy_meter):
    with energy_meter("a") as window:
        window.energy_j

def test_cpu_lease(gpus):
    assert (gpus.uuids, gpus.names, gpus.indices) == ((), (), ())
"""

#: Tests that must fail, and a word of the message.
WRONG = {
    "test_twice": "twice",
    "test_not_callable": "callable",
    "test_metric_without_value": "energy_per_output_token_j",
    "test_unknown_metric": "energy_in_calories",
    "test_work_that_raises": "ZeroDivisionError",
    "test_value_that_json_cannot_hold": "note",
    "test_own_metric_with_the_name_of_another": "energy_j",
    "test_end_without_begin": "never begun",
    "test_open_window_has_no_energy_yet": "end",
}

RANKS = """
import os
import pytest

def step(a, b=0):
    return os.environ["RANK"], os.environ["WORLD_SIZE"], a + b

@pytest.mark.gpus(2, fallback="cpu")
class TestRanks:
    def test_results_by_rank(self, workers):
        assert workers.world_size == 2
        assert workers.run(step, 3, b=4) == [("0", "2", 7), ("1", "2", 7)]

    def test_closures_travel_by_value(self, workers):
        n = 20
        class Local:
            value = 22
        assert workers.run(lambda: n + Local.value) == [42, 42]

    def test_imported_function(self, workers):
        assert workers.run("json:loads", "[1]") == [[1], [1]]

    def test_processes_of_their_own(self, workers):
        assert len({os.getpid(), *workers.run(os.getpid)}) == 3

    def test_measured_call(self, energy, workers):
        run = energy(workers.call(step, 1))
        assert run.duration_s > 0

    def test_skip_in_a_rank(self, workers):
        def work():
            import pytest
            pytest.skip("no such kernel")
        workers.run(work)

    def test_coroutine_is_refused(self, workers):
        async def work():
            pass
        workers.run(work)

    def test_time_limit(self, workers):
        def work():
            import time
            time.sleep(60)
        workers.run(work, timeout=0.5)

    def test_exception(self, workers):
        def work():
            if os.environ["RANK"] == "1":
                raise LookupError("no such layer")
        workers.run(work)

    def test_after_a_failure(self, workers):
        assert workers.run(step, 1) == [("0", "2", 1), ("1", "2", 1)]

@pytest.mark.gpus(1, fallback="cpu")
def test_function_in_the_rank(energy):
    run = energy(os.getpid)
    assert os.getpid() not in (run.result, *([run.result] if isinstance(run.result, int) else run.result))
"""


@pytest.fixture(scope="module")
def tests(module_project: Project) -> dict[str, Ended]:
    module_project.write("test_here.py", SUITE)
    return module_project.suite(module_project.meter())


def test_each_fixture_does_what_it_promises(tests: dict[str, Ended], module_project: Project) -> None:
    right = {name: ended for name, ended in tests.items() if name not in WRONG}
    assert len(right) >= 10
    assert {name: ended for name, ended in right.items() if ended.outcome != "passed"} == {}
    record = module_project.records()["test_own_values"]
    assert record["extra_info"] == {"note": {"a": [1, None, "ü"]}}
    metric = record["metrics"]["overlap"]
    assert (metric["value"], metric["unit"]) == (pytest.approx(0.6), "share")
    assert record["custom"]["overlap"]["better"] == "more"
    windows = module_project.records()["test_windows"]["windows"]
    assert sorted(window["name"] for window in windows) == ["inner", "outer"]


def test_a_wrong_use_fails_the_test_and_says_why(tests: dict[str, Ended]) -> None:
    for name, word in WRONG.items():
        assert tests[name].outcome == "failure", name
        assert word in tests[name].why, tests[name].why


def test_the_plugin_can_be_left_out(module_project: Project) -> None:
    module_project.write("plain/test_plain.py", "def test_it(): pass\n")
    ended = module_project.pytest("plain", PYTEST_ADDOPTS="-p no:llenergy -p no:cacheprovider")
    ended.check(passed=1)


UNMEASURED = """
import pathlib, time

def work():
    with open("calls", "a") as file:
        file.write("x")
    return 7

def test_result(energy):
    assert energy(work).result == 7

def test_limit(energy):
    assert energy(work).energy_j < 0

def test_window(energy_meter):
    with energy_meter("w"):
        work()

def test_plain(): pass
"""


def test_the_same_tests_run_without_measuring(project: Project) -> None:
    """Or those that measure are left out, or all others."""
    project.write("test_u.py", UNMEASURED)
    ended = project.pytest("--energy-disable", "-rs", "--energy-meter=command:touch metered")
    ended.check(passed=3, skipped=1)
    assert "nothing was measured" in ended.out
    assert "±" not in ended.out
    assert (project.text("calls"), project.exists("metered")) == ("xxx", False)
    project.pytest("--energy-skip").check(passed=1, skipped=3)
    project.pytest("--energy-only", "-k", "result or plain", project.meter()).check(passed=1, skipped=1)


@pytest.fixture(scope="module")
def in_ranks(module_project: Project) -> dict[str, Ended]:
    module_project.without_torch()
    module_project.write("ranks/test_ranks.py", RANKS)
    return module_project.suite("ranks", module_project.meter())


#: Tests that must not pass: what becomes of them, and a word of the reason.
IN_RANKS = {
    "test_skip_in_a_rank": ("skipped", "no such kernel"),
    "test_coroutine_is_refused": ("failure", "coroutine"),
    "test_time_limit": ("failure", "0.5 s"),
    "test_exception": ("failure", "LookupError: no such layer"),
}


def test_ranks_run_functions_of_the_test_and_fail_it(in_ranks: dict[str, Ended]) -> None:
    right = {name: ended for name, ended in in_ranks.items() if name not in IN_RANKS}
    assert len(right) >= 7
    assert {name: ended for name, ended in right.items() if ended.outcome != "passed"} == {}
    for name, (outcome, word) in IN_RANKS.items():
        assert in_ranks[name].outcome == outcome, name
        assert word in in_ranks[name].why, in_ranks[name].why
    assert "rank 1" in in_ranks["test_exception"].why


#: What a test may put in place of Python's files and clocks, as pyfakefs and freezegun do.
REPLACED = """
import builtins, io, os, threading, time
from unittest import mock
import pytest

def gone(path, *args, **kwargs):
    raise FileNotFoundError(2, "not in the fake file system", str(path))

@pytest.fixture
def fake_files(monkeypatch):
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir")):
        monkeypatch.setattr(module, name, gone)

@pytest.fixture
def frozen(monkeypatch):
    for name, value in (("time", 0.0), ("monotonic", 1.0), ("monotonic_ns", 10**9), ("perf_counter", 1.0)):
        monkeypatch.setattr(time, name, lambda value=value: value)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

def test_files(energy_meter, fake_files):
    with energy_meter("w"):
        time.sleep(0.2)

def test_files_later(energy_meter, monkeypatch):
    with energy_meter("w"):
        time.sleep(0.2)
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat")):
        monkeypatch.setattr(module, name, gone)

def test_ranks(workers, fake_files):
    workers.run(len, ())

@pytest.mark.gpus(1, fallback="cpu")
def test_clock_in_ranks(frozen, energy, workers):
    energy(workers.call(sum, range(10)))

def test_mock(energy_meter, monkeypatch):
    with energy_meter("w"):
        time.sleep(0.2)
    monkeypatch.setattr(builtins, "open", mock.mock_open())

def test_clock(frozen, energy):
    energy(threading.Event().wait, 0.3)

def test_window(frozen, energy_meter):
    with energy_meter("w"):
        threading.Event().wait(0.3)

def test_next(energy):
    energy(time.sleep, 0.02)
"""


def test_what_a_test_replaces_harms_no_other_test(project: Project) -> None:
    project.write("test_replaced.py", REPLACED)
    ended = project.pytest("--energy-report", "--energy-save=saved", project.meter())
    assert "ERROR" not in ended.out
    assert ended.ret == 1
    records = project.records()
    failed = {name for name, record in records.items() if record["status"] == "failed"}
    assert failed == {"test_files"}
    assert "ranks need real files" in ended.out
    assert records["test_clock_in_ranks"]["start_s"] > 0
    measured = ("test_files_later", "test_mock", "test_window", "test_clock")
    parts = [each for name in measured for each in records[name]["windows"] or records[name]["rounds"]]
    # The program of the meter may have been kept from the CPU meanwhile.
    known = [each for each in parts if each["energy_j"] is not None]
    assert len(known) >= len(parts) / 2, parts
    for part in known:
        assert part["energy_j"] == pytest.approx(10 * part["duration_s"], rel=0.3), part
    assert (project.path / ".llenergy" / "saved.json").exists()
