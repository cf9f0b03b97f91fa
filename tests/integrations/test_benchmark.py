# SPDX-License-Identifier: Apache-2.0
"""Suites of pytest-benchmark, unchanged: each benchmark has a record, and joules in ``extra_info``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_llenergy.model.report import json_schema

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

Read = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

#: The meter of ten watts tells joules by the time alone, so that truth is ten times the seconds.
WATTS = 10

#: Less than pytest-benchmark would do, and the same timer.
SHORT = ("--benchmark-max-time=0.35", "-p", "no:cacheprovider")

BOTH = """
    import time
    def test_call(benchmark):
        assert benchmark(time.sleep, 0.002) is None
    def test_pedantic(benchmark):
        assert benchmark.pedantic(lambda n: time.sleep(n) or n, args=(0.2,), rounds=4) == 0.2
"""


@pytest.fixture
def bench(quick: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Run a suite with a report."""

    def run(suite: str, *args: str) -> pytest.RunResult:
        quick.makepyfile(suite)
        return quick.runpytest("--energy-report", *SHORT, *args)

    return run


def dumped(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    """What --benchmark-json has written."""
    found: list[dict[str, Any]] = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    return found


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {record["id"].rpartition("::")[2]: record for record in report["records"]}


def energy(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["metrics"]["energy_j"]
    return found


def seconds(record: dict[str, Any]) -> float:
    return float(record["metrics"]["duration_s"]["value"])


class TestMeasured:
    def test_call_and_pedantic_have_joules_of_an_iteration(
        self, bench: Callable[..., pytest.RunResult], read_report: Read, pytester: pytest.Pytester
    ) -> None:
        result = bench(BOTH, "--benchmark-json=out.json")
        result.assert_outcomes(passed=2)
        report = read_report()
        jsonschema.validate(report, json_schema())
        records = by_name(report)
        told = {
            each["name"]: each for each in json.loads((pytester.path / "out.json").read_text())["benchmarks"]
        }
        assert set(records) == set(told) == {"test_call", "test_pedantic"}
        for name, record in records.items():
            true_j = WATTS * told[name]["stats"]["mean"]
            found = energy(record)
            assert record["status"] == "measured"
            assert record["devices"] == ["cpu"]
            assert abs(found["value"] - true_j) <= 2 * found["uncertainty_absolute"] + 1e-4 * true_j
            assert record["procedure"]["criterion"].startswith("pytest-benchmark 5.")
            extra = told[name]["extra_info"]
            assert extra["energy_j"] == found["value"]
            assert extra["energy_u_j"] == found["uncertainty"]
            assert extra["energy_kind"] == "measured"
            assert extra["energy_meters"] == "ten-watts"
            assert "duration_s" not in extra, "seconds are in stats"
            assert seconds(record) == pytest.approx(told[name]["stats"]["mean"], rel=1e-6)
        assert [round_["iterations"] for round_ in records["test_pedantic"]["rounds"]] == [1] * 4
        assert result.stdout.str().count("ten-watts") == 2

    def test_thousands_of_rounds_are_joined(
        self, bench: Callable[..., pytest.RunResult], read_report: Read, pytester: pytest.Pytester
    ) -> None:
        bench("def test_it(benchmark):\n    benchmark(sum, range(100))\n", "--benchmark-json=out.json")
        (record,) = read_report()["records"]
        (told,) = dumped(pytester)
        assert told["stats"]["rounds"] > 1000
        assert 2 <= len(record["rounds"]) <= 10
        iterations = sum(round_["iterations"] for round_ in record["rounds"])
        assert iterations == told["stats"]["rounds"] * told["stats"]["iterations"]
        found = energy(record)
        true_j = WATTS * told["stats"]["mean"]
        assert abs(found["value"] - true_j) <= 2 * found["uncertainty_absolute"] + 0.01 * true_j
        (flag,) = [flag for flag in record["flags"] if flag["name"] == "joined-rounds"]
        assert flag["detail"].startswith(f"{told['stats']['rounds']} rounds of ")

    def test_what_sets_up_a_round_is_not_counted(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        bench(
            """
            import time
            def test_it(benchmark):
                def prepare():
                    time.sleep(0.2)
                    return (0.1,), {}
                benchmark.pedantic(time.sleep, setup=prepare, rounds=4)
            """
        )
        (record,) = read_report()["records"]
        assert len(record["rounds"]) == 4
        # A sleep may take longer than it was told to, but not three times as long.
        assert seconds(record) < 0.2
        assert energy(record)["value"] == pytest.approx(WATTS * seconds(record), rel=0.02)

    def test_storage_and_comparison_carry_it(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester
    ) -> None:
        bench(BOTH, "--benchmark-save=one")
        result = bench(BOTH, "--benchmark-save=two", "--benchmark-compare=0001")
        result.assert_outcomes(passed=2)
        for path in sorted(pytester.path.glob(".benchmarks/*/*.json")):
            for each in json.loads(path.read_text())["benchmarks"]:
                assert each["extra_info"]["energy_j"] > 0, path

    def test_the_estimate_is_labelled(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester, read_report: Read
    ) -> None:
        """On the CPU there is a model at least."""
        spin = "def test_it(benchmark):\n    benchmark.pedantic(sum, (range(3_000_000),), rounds=12)\n"
        bench(spin, "--energy-meter=estimate", "--benchmark-json=out.json").assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        (told,) = dumped(pytester)
        assert told["extra_info"]["energy_kind"] == "estimated"
        assert record["flags"][0]["name"] == "estimated"
        # One core is busy at least, and no more than there are; the rest of the host is idle.
        (meter,) = record["meters"]
        cpus = int(meter["accuracy"].rpartition("(")[2].rstrip(")"))
        low_w, high_w = 0.74 * cpus + 2.76 * 0.8, 3.5 * cpus * 1.05
        assert low_w <= record["metrics"]["mean_power_w"]["value"] <= high_w

    @pytest.mark.parametrize(
        ("suite", "conftest"),
        [
            ("class TestIt:\n    def test_it(self, benchmark):\n        benchmark(time.sleep, 0.002)\n", ""),
            ("def test_it(benchmark):\n    @benchmark\n    def result():\n        time.sleep(0.002)\n", ""),
            (
                "def test_it(request):\n    request.getfixturevalue('benchmark')(time.sleep, 0.002)\n",
                "",
            ),
            (
                "def test_it(bench):\n    bench(0.002)\n",
                "@pytest.fixture\ndef bench(benchmark):\n    return lambda n: benchmark(time.sleep, n)\n",
            ),
            (
                "def test_it(benchmark):\n    benchmark(time.sleep, 0.002)\n",
                "@pytest.fixture\ndef benchmark(benchmark):\n    benchmark.group = 'a'; return benchmark\n",
            ),
            (
                "@pytest.mark.benchmark(group='a', min_rounds=3, warmup=True, warmup_iterations=10)\n"
                "def test_it(benchmark):\n    benchmark(time.sleep, 0.002)\n",
                "",
            ),
        ],
        ids=["method", "decorator", "by name", "wrapped", "overridden", "marked"],
    )
    def test_however_it_is_used(
        self,
        bench: Callable[..., pytest.RunResult],
        pytester: pytest.Pytester,
        read_report: Read,
        suite: str,
        conftest: str,
    ) -> None:
        header = "import time\nimport pytest\n"
        ours = (pytester.path / "conftest.py").read_text()
        (pytester.path / "conftest.py").write_text(f"{header}{conftest}{ours}")
        bench(header + suite).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert record["status"] == "measured"
        assert 0.002 <= seconds(record) < 0.01
        assert energy(record)["value"] == pytest.approx(WATTS * seconds(record), rel=0.02)


class TestNotMeasured:
    @pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip"])
    def test_benchmarks_that_do_not_run(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester, option: str
    ) -> None:
        result = bench(BOTH, option)
        assert result.parseoutcomes() in ({"passed": 2}, {"skipped": 2})
        result.stdout.fnmatch_lines(["energy report: no test was measured, *"])
        assert not (pytester.path / "energy.json").exists()

    def test_only_benchmarks(self, bench: Callable[..., pytest.RunResult], read_report: Read) -> None:
        suite = BOTH + "    def test_other():\n        pass\n"
        bench(suite, "--benchmark-only").assert_outcomes(passed=2, skipped=1)
        assert set(by_name(read_report())) == {"test_call", "test_pedantic"}

    def test_under_xdist_pytest_benchmark_is_off(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester
    ) -> None:
        result = bench(BOTH, "-n1")
        result.assert_outcomes(passed=2)
        assert not (pytester.path / "energy.json").exists()

    def test_without_pytest_benchmark_nothing_changes(
        self, quick: pytest.Pytester, read_report: Read
    ) -> None:
        quick.makepyfile(
            "import pytest, time\n@pytest.fixture\ndef benchmark():\n    return 7\n"
            "def test_own(benchmark):\n    assert benchmark == 7\n"
            "def test_it(energy):\n    energy(time.sleep, 0.05)\n"
        )
        quick.runpytest("--energy-report", "-p", "no:benchmark").assert_outcomes(passed=2)
        assert set(by_name(read_report())) == {"test_it"}

    def test_a_test_that_measures_by_itself_is_measured_by_itself(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        bench(
            """
            import time
            def test_it(energy, benchmark):
                benchmark(time.sleep, 0.001)
                energy(time.sleep, 0.05)
                assert "energy_j" not in benchmark.extra_info
            """
        ).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert energy(record)["value"] == pytest.approx(WATTS * 0.05, rel=0.1)

    def test_one_that_is_not_called_is_told_and_passes(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        # pytest-benchmark warns of it.
        bench("def test_it(benchmark):\n    pass\n", "-Wdefault").assert_outcomes(passed=1, warnings=1)
        (record,) = read_report()["records"]
        assert (record["status"], record["rounds"]) == ("invalid", [])
        assert record["reason"] == "the test asks for the fixture benchmark and has not called it"

    def test_one_that_fails_is_told_and_the_next_is_measured(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        result = bench(
            """
            import time
            calls = []
            def breaks():
                calls.append(1)
                time.sleep(0.001)
                if len(calls) == 20:
                    raise ValueError("the twentieth")
            def test_breaks(benchmark):
                benchmark(breaks)
            def test_twice(benchmark):
                benchmark(time.sleep, 0.002)
                benchmark(time.sleep, 0.002)
            def test_works(benchmark):
                benchmark(time.sleep, 0.002)
            """
        )
        result.assert_outcomes(passed=1, failed=2)
        records = by_name(read_report())
        assert {name: record["status"] for name, record in records.items()} == {
            "test_breaks": "failed",
            "test_twice": "failed",
            "test_works": "measured",
        }
        assert records["test_breaks"]["reason"] == "ValueError: the twentieth"
        assert "FixtureAlreadyUsed" in records["test_twice"]["reason"]
        assert "measure_beside" not in result.stdout.str(), "the traceback is that of the test"

    def test_a_skip_inside_is_a_skip(self, bench: Callable[..., pytest.RunResult], read_report: Read) -> None:
        bench(
            "import pytest\ndef test_it(benchmark):\n    benchmark(lambda: pytest.skip('not here'))\n"
        ).assert_outcomes(skipped=1)
        (record,) = read_report()["records"]
        assert (record["status"], record["reason"]) == ("skipped", "not here")

    def test_what_is_required_is_required(self, bench: Callable[..., pytest.RunResult]) -> None:
        result = bench(BOTH, "--energy-meter=estimate", "--energy-require=measured", "-Wdefault")
        result.assert_outcomes(failed=2)
        result.stdout.fnmatch_lines(["*MeterError: no meter that measures (--energy-require=measured)*"])

    def test_a_fixture_of_codspeed_is_told(self, pytester: pytest.Pytester, read_report: Read) -> None:
        pytest.importorskip("pytest_codspeed")
        pytester.makepyfile(BOTH)
        result = pytester.runpytest_subprocess("--energy-report", "--codspeed", "-p", "no:cacheprovider")
        result.assert_outcomes(passed=2)
        for record in read_report()["records"]:
            assert record["status"] == "invalid"
            assert "pytest-codspeed" in record["reason"]

    def test_without_a_report_it_is_not_even_imported(self, quick: pytest.Pytester) -> None:
        quick.makepyfile(
            "import sys\ndef test_it(benchmark):\n    benchmark.pedantic(int)\n"
            "    assert not [name for name in sys.modules if 'integrations.benchmark' in name]\n"
            "    assert type(benchmark).__module__ == 'pytest_benchmark.fixture'\n"
        )
        quick.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


class TestGates:
    SLEEPS = "import time\ndef test_it(benchmark):\n    benchmark(time.sleep, {seconds})\n"

    def test_a_regression_fails_and_the_same_does_not(
        self, quick: pytest.Pytester, read_report: Read
    ) -> None:
        def run(seconds: float, *args: str) -> pytest.RunResult:
            quick.makepyfile(self.SLEEPS.format(seconds=seconds))
            return quick.runpytest(*args, "-p", "no:cacheprovider")

        gate = ("--energy-report", "--energy-compare=base", "--energy-fail-on=energy_j:20%")
        run(0.02, "--energy-save=base").assert_outcomes(passed=1)
        run(0.02, *gate).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert [each["verdict"] for each in record["comparisons"]] == ["unchanged"]
        run(0.035, *gate).assert_outcomes(failed=1)
        (record,) = read_report()["records"]
        assert [each["verdict"] for each in record["comparisons"]] == ["regressed"]

    @pytest.mark.parametrize(("budget", "outcome"), [("1 J", "passed"), ("1 mJ", "failed")])
    def test_a_budget_is_kept_without_a_report_too(
        self, quick: pytest.Pytester, budget: str, outcome: str
    ) -> None:
        mark = f"import pytest\npytestmark = pytest.mark.energy_gate(budget='{budget}')\n"
        quick.makepyfile(mark + self.SLEEPS.format(seconds=0.02))
        result = quick.runpytest(*SHORT)
        assert result.parseoutcomes() == {outcome: 1}
        assert not (quick.path / "energy.json").exists()


#: Each test drives the board by itself and keeps when its rounds were, so that their joules are known.
TRUE = """
    import os, time
    import pytest
    from tests.nvml_sim import World

    world = World.open(os.environ["NVML_SIM_WORLD"])

    @pytest.fixture
    def spans(benchmark):
        found = []
        yield found
        joules = [world.true_energy_j(0, start_ns, end_ns) for start_ns, end_ns in found]
        benchmark.extra_info["true_j"] = sum(joules) / len(joules)
        world.set_power(0, 100.0)

    def test_long(benchmark, spans):
        def work():
            start_ns = world.set_power(0, 500.0)
            time.sleep(0.2)
            world.set_power(0, 300.0)
            time.sleep(0.15)
            spans.append((start_ns, time.monotonic_ns()))
        def between():
            world.set_power(0, 150.0)
            time.sleep(0.1)
        benchmark.pedantic(work, setup=between, rounds=6)

    def test_short(benchmark, spans):
        def work():
            start_ns = world.set_power(0, 600.0)
            time.sleep(0.002)
            world.set_power(0, 200.0)
            time.sleep(0.002)
            spans.append((start_ns, time.monotonic_ns()))
        benchmark.pedantic(work, rounds=400)

    def test_busy(benchmark, spans):
        '''A loop that never lets go of the interpreter's lock by itself.'''
        def work():
            start_ns = world.set_power(0, 400.0)
            for _ in range(150_000):
                pass
            spans.append((start_ns, time.monotonic_ns()))
        benchmark(work)
        # Of the calls, those for calibration and for the result are none of its rounds.
        del spans[: -len(benchmark.stats.stats.data) - 1], spans[-1]
"""


class TestBoards:
    """Power that is known exactly, driven by the benchmarked function itself, read through NVML."""

    @pytest.fixture
    def run(
        self, pytester: pytest.Pytester, tmp_path: Path, nvml_children: Give, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., tuple[pytest.RunResult, World]]:
        def call(suite: str, boards: Sequence[Board], *args: str) -> tuple[pytest.RunResult, World]:
            world = nvml_children(World(tmp_path / "world", boards))
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            pytester.makepyfile(suite)
            return pytester.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider", *args), world

        return call

    @pytest.mark.parametrize("latch_ms", [20, 100])
    def test_joules_agree_with_the_truth(
        self,
        run: Callable[..., tuple[pytest.RunResult, World]],
        pytester: pytest.Pytester,
        read_report: Read,
        latch_ms: int,
    ) -> None:
        board = Board(power_w=100.0, latch_ns=latch_ms * 1_000_000)
        result, world = run(TRUE, [board], "--benchmark-json=out.json")
        result.assert_outcomes(passed=3)
        told = {each["name"]: each["extra_info"] for each in dumped(pytester)}
        for name, record in by_name(read_report()).items():
            assert record["devices"] == [world.board(0).uuid]
            assert [meter["name"] for meter in record["meters"]] == ["nvml"]
            found = energy(record)
            true_j = told[name]["true_j"]
            # Two standard uncertainties hold in 95 % of runs; this one gets three.
            assert abs(found["value"] - true_j) <= 3 * found["uncertainty"], (name, found, true_j)
            if name != "test_busy":
                # What keeps the reader from the interpreter's lock leaves less to be known.
                assert found["uncertainty"] < 0.2 * true_j

    def test_all_boards_of_this_process_are_leased_and_read(
        self,
        run: Callable[..., tuple[pytest.RunResult, World]],
        read_report: Read,
    ) -> None:
        suite = "import time\ndef test_it(benchmark):\n    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
        boards = [Board(power_w=watts) for watts in (100.0, 200.0, 400.0)]
        _, world = run(suite, boards)
        (record,) = read_report()["records"]
        assert record["devices"] == [world.board(index).uuid for index in range(3)]
        assert energy(record)["value"] == pytest.approx(700 * seconds(record), rel=0.02)

    def test_an_option_and_a_mark_say_which(
        self, run: Callable[..., tuple[pytest.RunResult, World]], read_report: Read
    ) -> None:
        suite = (
            "import pytest, time\ndef test_chosen(benchmark):\n"
            "    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
            "@pytest.mark.gpus(1, name='L4')\ndef test_marked(benchmark, gpus):\n"
            "    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
        )
        boards = [Board(power_w=100.0), Board(power_w=30.0, name="NVIDIA L4"), Board(power_w=400.0)]
        _, world = run(suite, boards, "--energy-gpus=1,2")
        records = by_name(read_report())
        assert records["test_chosen"]["devices"] == [world.board(index).uuid for index in (1, 2)]
        chosen, marked = records["test_chosen"], records["test_marked"]
        assert energy(chosen)["value"] == pytest.approx(430 * seconds(chosen), rel=0.02)
        assert records["test_marked"]["devices"] == [world.board(1).uuid]
        assert energy(marked)["value"] == pytest.approx(30 * seconds(marked), rel=0.02)
