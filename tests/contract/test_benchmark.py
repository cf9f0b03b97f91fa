# SPDX-License-Identifier: Apache-2.0
"""Suites of pytest-benchmark are measured as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nvml_sim import Board, World

from .conftest import GiveBoards, open_project
from .project import BOARDS_ALONE, Outcome, Project

pytest.importorskip("pytest_benchmark")

SUITE = """
import time
import pytest

def test_call(benchmark):
    benchmark(time.sleep, 0.1)
    benchmark.extra_info["own"] = 1

def test_decorator(benchmark):
    @benchmark
    def work():
        time.sleep(0.1)

def test_pedantic(benchmark):
    calls = []
    benchmark.pedantic(lambda: (calls.append(1), time.sleep(0.1)), rounds=5, iterations=1)
    assert len(calls) == 5

def test_short(benchmark):
    assert benchmark(sum, [1, 2]) == 3

def test_raises(benchmark):
    benchmark(lambda: 1 / 0)

def test_never_called(benchmark):
    pass

def test_unmeasured():
    pass
"""

OPTIONS = ("--benchmark-min-rounds=5", "--benchmark-max-time=0.5", "--benchmark-json=bench.json")

Ran = tuple[Project, World, Outcome]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, give_boards: GiveBoards) -> Iterator[Ran]:
    """The suite on a simulated board of 100 W."""
    with open_project(tmp_path_factory.mktemp("benchmark")) as project:
        world = give_boards(project, [Board(power_w=100.0, latch_ns=20_000_000)])
        project.plugin("benchmark")
        project.write("pytest.ini", BOARDS_ALONE)
        project.write("test_b.py", SUITE)
        yield project, world, project.pytest(*OPTIONS, "--energy-report")


def record(ran: Ran, name: str) -> dict[str, Any]:
    return ran[0].records()[name]


def test_the_suite_passes_as_without_the_plugin(ran: Ran) -> None:
    ran[2].check(passed=6, failed=1)
    assert "test_call" in ran[2].out
    assert record(ran, "test_raises")["status"] == "failed"
    never = record(ran, "test_never_called")
    assert never["status"] == "invalid"
    assert never["reason"]
    assert "test_unmeasured" not in ran[0].records()


def test_the_energy_is_that_of_one_iteration(ran: Ran) -> None:
    """100 W for 0.1 s, in the benchmark's own file, too; a microsecond has an energy, or a reason."""
    medians_s = {each["name"]: each["stats"]["median"] for each in ran[0].report("bench.json")["benchmarks"]}
    for name in ("test_call", "test_decorator", "test_pedantic"):
        found = record(ran, name)
        assert found["status"] == "measured", found["reason"]
        metric = found["metrics"]["energy_j"]
        assert metric["value"] == pytest.approx(100 * medians_s[name], rel=0.15)
        assert metric["uncertainty_absolute"] > 0
    found = record(ran, "test_short")
    value = found["metrics"]["energy_j"]["value"]
    assert found["reason"] if value is None else 0 < value < 0.01
    for each in ran[0].report("bench.json")["benchmarks"]:
        if each["name"] == "test_call":
            info = each["extra_info"]
            assert info["own"] == 1
            assert info["energy_j"] == record(ran, "test_call")["metrics"]["energy_j"]["value"]
            assert info["energy_kind"] == "measured"
        # Readers take statistics for seconds.
        assert not any("energy" in key for key in each["stats"])


def test_nothing_is_measured_without_being_asked(ran: Ran) -> None:
    ended = ran[0].pytest(*OPTIONS[:2], "-k", "short")
    ended.check(passed=1)
    assert "±" not in ended.out


def test_a_budget_gates_a_benchmark(ran: Ran) -> None:
    mark = "import pytest\n@pytest.mark.energy_gate(budget='1 J')\n"
    ran[0].write("gated/test_g.py", SUITE.replace("def test_call", f"{mark}def test_call"))
    ended = ran[0].pytest("gated", "-k", "test_call", *OPTIONS[:2])
    ended.check(failed=1)
    assert "1 J" in ended.text


def test_a_regression_of_a_benchmark_is_found(ran: Ran) -> None:
    project, world, _ = ran
    gate = ["test_b.py", "-k", "test_pedantic", "--benchmark-warmup=off"]
    project.pytest(*gate, "--energy-save=base").check(passed=1)
    world.set_power(0, 150.0)
    time.sleep(0.2)
    ended = project.pytest(*gate, "--energy-compare=base", "--energy-fail-on=mean_power_w:10%")
    world.set_power(0, 100.0)
    assert ended.ret == 1
    assert "regressed" in ended.text
