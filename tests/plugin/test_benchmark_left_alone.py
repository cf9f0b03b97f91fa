# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that are not measured: disabled, skipped, failed, unused, or of another tool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .suites import BOTH, WATTS, Read, by_name, energy


class TestNotMeasured:
    @pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip"])
    def test_disabled_or_skipped_benchmarks_write_no_report(
        self, bench: Callable[..., pytest.RunResult], pytester: pytest.Pytester, option: str
    ) -> None:
        result = bench(BOTH, option)
        assert result.parseoutcomes() in ({"passed": 2}, {"skipped": 2})
        result.stdout.fnmatch_lines(["energy report: no test was measured; *"])
        assert not (pytester.path / "energy.json").exists()

    def test_benchmarks_in_workers_are_invalid(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        """The benchmarks run, so each has a record that gives the reason for the missing measurement."""
        result = bench(BOTH, "-n2")
        result.assert_outcomes(passed=2)
        records = by_name(read_report())
        assert set(records) == {"test_call", "test_pedantic"}
        for record in records.values():
            assert (record["status"], record["rounds"], record["devices"]) == ("invalid", [], [])
            assert record["reason"].startswith("pytest-benchmark turns itself off under pytest-xdist, ")
        lines = [line for line in result.outlines if line.startswith("INVALID ")]
        assert len(lines) == 1
        assert lines[0].endswith(("test_call and 1 more:", "test_pedantic and 1 more:"))

    def test_gate_on_an_unmeasured_benchmark_fails(self, bench: Callable[..., pytest.RunResult]) -> None:
        result = bench(
            "import pytest\n@pytest.mark.energy_gate(budget='1 MJ')\ndef test_it(benchmark):\n"
            "    benchmark(sum, [1])\n",
            "-n1",
        )
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*energy_gate: energy_j has no value (nothing was measured)*"])

    def test_energy_fixture_takes_precedence_over_benchmark(
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
        slept_s = record["metrics"]["duration_s"]["value"]
        assert slept_s >= 0.05
        found = energy(record)
        assert abs(found["value"] - WATTS * slept_s) <= 4 * found["uncertainty"]

    def test_failed_benchmark_is_recorded_and_the_next_is_measured(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        result = bench(
            """
            import time
            calls = []
            def breaks():
                calls.append(1)
                time.sleep(0.001)
                if len(calls) == 5:
                    raise ValueError("the fifth")
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
        assert records["test_breaks"]["reason"] == "ValueError: the fifth"
        assert "FixtureAlreadyUsed" in records["test_twice"]["reason"]
        assert "measure_foreign_rounds" not in result.stdout.str(), "the traceback is that of the test"

    def test_benchmark_with_an_expected_exception_is_invalid(
        self, bench: Callable[..., pytest.RunResult], read_report: Read
    ) -> None:
        bench(
            """
            import pytest
            def test_it(benchmark):
                with pytest.raises(ValueError):
                    benchmark(int, "seven")
            """
        ).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert (record["status"], record["reason"]) == ("invalid", "the benchmark raised ValueError")

    def test_each_way_to_the_fixture(self, bench: Callable[..., pytest.RunResult], read_report: Read) -> None:
        suite = """
            import pytest, time
            @pytest.fixture
            def bench(benchmark):
                return benchmark
            def test_unrelated():
                pass
            def test_named(benchmark):
                benchmark(time.sleep, 0.002)
            def test_of_another(bench):
                bench(time.sleep, 0.002)
            @pytest.mark.usefixtures("benchmark")
            def test_marked():
                pass
            """
        # pytest-benchmark warns about a test that does not call the fixture.
        bench(suite, "-Wdefault").assert_outcomes(passed=4, warnings=1)
        assert {name: record["status"] for name, record in by_name(read_report()).items()} == {
            "test_named": "measured",
            "test_of_another": "measured",
            "test_marked": "invalid",
        }

    def test_integration_is_not_imported_without_a_report(self, quick: pytest.Pytester) -> None:
        quick.makepyfile(
            "import sys\ndef test_it(benchmark):\n    benchmark.pedantic(int)\n"
            "    assert not [name for name in sys.modules if 'integrations.benchmark' in name]\n"
            "    assert type(benchmark).__module__ == 'pytest_benchmark.fixture'\n"
        )
        quick.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
