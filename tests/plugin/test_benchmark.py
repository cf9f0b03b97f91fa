# SPDX-License-Identifier: Apache-2.0
"""Unchanged suites of pytest-benchmark: each benchmark has a record, and its energy in ``extra_info``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import jsonschema
import pytest

from pytest_llenergy.record.report import json_schema

from ..conftest import TEN_WATTS
from .suites import BOTH, SHORT, WATTS, Read, by_name, dumped, energy, seconds

pytestmark = pytest.mark.clock


class TestMeasured:
    def test_call_and_pedantic_have_energy_per_iteration(
        self, bench: Callable[..., pytest.RunResult], read_report: Read, pytester: pytest.Pytester
    ) -> None:
        result = bench(BOTH, "--benchmark-json=out.json")
        result.assert_outcomes(passed=2)
        report = read_report()
        jsonschema.validate(report, json_schema())
        records = by_name(report)
        saved = {
            each["name"]: each for each in json.loads((pytester.path / "out.json").read_text())["benchmarks"]
        }
        assert set(records) == set(saved) == {"test_call", "test_pedantic"}
        for name, record in records.items():
            true_j = WATTS * seconds(record)
            found = energy(record)
            assert record["status"] == "measured"
            assert record["devices"] == ["cpu"]
            assert abs(found["value"] - true_j) <= 4 * found["uncertainty_absolute"] + 1e-4 * true_j
            assert record["procedure"]["criterion"].startswith("pytest-benchmark 5.")
            extra = saved[name]["extra_info"]
            assert extra["energy_j"] == found["value"]
            assert extra["energy_u_j"] == found["uncertainty"]
            assert extra["energy_kind"] == "measured"
            assert "duration_s" not in extra, "seconds are in stats"
            stats = saved[name]["stats"]
            assert stats["min"] <= seconds(record) <= stats["max"]
        pedantic = saved["test_pedantic"]["stats"]["median"]
        assert seconds(records["test_pedantic"]) == pytest.approx(pedantic, rel=1e-6)
        assert [round_["iterations"] for round_ in records["test_pedantic"]["rounds"]] == [1] * 4
        assert result.stdout.str().count("ten-watts") == 1

    def test_thousands_of_short_rounds_are_joined(
        self, bench: Callable[..., pytest.RunResult], read_report: Read, pytester: pytest.Pytester
    ) -> None:
        bench("def test_it(benchmark):\n    benchmark(sum, range(100))\n", "--benchmark-json=out.json")
        (record,) = read_report()["records"]
        (saved,) = dumped(pytester)
        assert saved["stats"]["rounds"] > 1000
        assert 2 <= len(record["rounds"]) <= 10
        iterations = sum(round_["iterations"] for round_ in record["rounds"])
        assert iterations == saved["stats"]["rounds"] * saved["stats"]["iterations"]
        found = energy(record)
        true_j = WATTS * seconds(record)
        assert saved["stats"]["min"] <= seconds(record) <= saved["stats"]["max"]
        assert abs(found["value"] - true_j) <= 4 * found["uncertainty_absolute"] + 0.01 * true_j
        (flag,) = [flag for flag in record["flags"] if flag["name"] == "meter" and "joined" in flag["detail"]]
        assert flag["detail"].startswith(f"{saved['stats']['rounds']} rounds of ")

    def test_setup_of_a_round_is_not_measured(
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
        # The setup sleeps for 0.2 s and the round for 0.1 s.
        assert seconds(record) < 0.2
        assert energy(record)["value"] == pytest.approx(WATTS * seconds(record), rel=0.02)

    def test_estimate_is_labelled(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester, read_report: Read
    ) -> None:
        """The power model of the CPU is always available."""
        spin = "def test_it(benchmark):\n    benchmark.pedantic(sum, (range(3_000_000),), rounds=12)\n"
        bench(spin, "--energy-meter=estimate", "--benchmark-json=out.json").assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        (saved,) = dumped(pytester)
        assert saved["extra_info"]["energy_kind"] == "estimated"
        assert record["flags"][0]["name"] == "estimated"
        # One busy core at most, and less where others hold it.
        assert 0 < record["metrics"]["mean_power_w"]["value"] <= 3.5 * 1.1

    @pytest.mark.parametrize(
        ("suite", "conftest"),
        [
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
        ids=["wrapped", "overridden", "marked"],
    )
    def test_benchmark_is_measured_in_every_style_of_use(
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
        # Of one call, of which there are more than a hundred.
        assert 0.002 <= seconds(record) < 0.1
        assert 0.9 * WATTS * 0.002 <= energy(record)["value"] < 0.1 * WATTS
        known = [each for each in record["rounds"] if each["energy_j"] is not None]
        assert known
        # Medians of joules and of seconds may be those of different rounds.
        for each in known:
            true_j = WATTS * each["duration_s"]
            assert abs(each["energy_j"] - true_j) <= 4 * each["energy_u_j"] + 0.02 * true_j


@pytest.mark.usefixtures("no_xdist")
class TestGates:
    SLEEPS = "import time\ndef test_it(benchmark):\n    benchmark(time.sleep, {seconds})\n"

    def test_only_a_regression_fails(self, quick: pytest.Pytester, read_report: Read) -> None:
        # The code of the test stays the same, and other tests that run meanwhile have no effect on a GPU.
        quick.makepyfile("from work import S\n" + self.SLEEPS.format(seconds="S"))
        quick.makeconftest(TEN_WATTS.replace('"cpu:ten"', '"gpu:ten"'))

        def run(seconds: float, *args: str) -> pytest.RunResult:
            sys.modules.pop("work", None)
            quick.makepyfile(work=f"S = {seconds}")
            return quick.runpytest(*args, "-p", "no:cacheprovider")

        gate = ("--energy-report", "--energy-compare=base", "--energy-fail-on=energy_j:20%")
        run(0.02, "--energy-save=base").assert_outcomes(passed=1)
        run(0.02, *gate).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert [each["verdict"] for each in record["comparisons"]] == ["unchanged"]
        run(0.035, *gate).assert_outcomes(failed=1)
        (record,) = read_report()["records"]
        assert [each["verdict"] for each in record["comparisons"]] == ["regressed"]

    def test_budget_added_by_a_hook_is_enforced(self, quick: pytest.Pytester) -> None:
        quick.makeconftest(
            TEN_WATTS
            + """
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.energy_gate(budget="1 mJ"))
"""
        )
        quick.makepyfile(self.SLEEPS.format(seconds=0.02))
        assert quick.runpytest(*SHORT).parseoutcomes() == {"failed": 1}
