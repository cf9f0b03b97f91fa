# SPDX-License-Identifier: Apache-2.0
"""A gate that could not be evaluated fails or is reported; it never passes silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .inner import COMPARE, FAIL, ONE, TWO, edit, with_b

Read = Callable[..., dict[str, Any]]


class TestNoSilentPass:
    def test_new_and_removed_tests_are_listed(self, base: pytest.Pytester, read_report: Read) -> None:
        edit("base.json", with_b)
        base.makepyfile(test_some=TWO.replace("test_b(energy):", "test_c(energy):\n    assert energy"))
        result = base.runpytest(COMPARE, "--energy-fail-on=mean_power_w:40%", "--energy-report")
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(
            [
                "new: test_some.py::test_c: not in the baseline",
                "1 worse, 1 new; *",
                "in base.json but not compared: test_b (not in this run)",
            ]
        )
        assert read_report()["baseline"]["absent"] == ["test_some.py::test_b"]

    def test_run_with_only_new_tests_fails(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some="", test_other=ONE.replace("0.05", "0.06"))
        result = base.runpytest(COMPARE, FAIL)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            [
                "ERROR: 1 test of base.json not compared: test_a (not in this run); nothing was compared",
                "ERROR: nothing was gated: 1 new",
            ]
        )

    def test_gates_from_the_ini_file_ignore_runs_without_energy_tests(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ini = Path("tox.ini").read_text() + "\nenergy_compare = base.json\n"
        Path("tox.ini").write_text(f"{ini}energy_fail_on =\n    mean_power_w:3%\n    duration_s:90%\n")
        # Paths in the ini file are relative to the root directory.
        monkeypatch.chdir(base.mkdir("elsewhere"))
        base.makepyfile(test_some="def test_a(): pass")
        base.runpytest("..").assert_outcomes(passed=1)
        base.makepyfile(test_some=ONE)
        base.runpytest("..").assert_outcomes(failed=1)

    def test_another_device_fails_and_the_difference_is_named(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["environment"]["host"].update(cpu_model="Another CPU"))
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["energy_gate: mean_power_w is not comparable: different devices (cpu.model: Another CPU -> *)"]
        )

    def test_estimate_is_not_compared_with_a_measurement(
        self, base: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KIND", "estimated")
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        message = "energy_gate: mean_power_w is not comparable: base is measured, head is estimated"
        result.stdout.fnmatch_lines([message])

    @pytest.mark.parametrize("value", [0.0, None])
    def test_baseline_without_a_value_is_invalid(self, base: pytest.Pytester, value: float | None) -> None:
        def nothing(report: dict[str, Any]) -> None:
            for each in report["records"][0]["rounds"]:
                each.update(energy_j=value, reason="the counter stood still")

        edit("base.json", nothing)
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["energy_gate: mean_power_w is invalid: base has *"])

    @pytest.mark.parametrize("word", ["warn", "pass", "fail"])
    def test_scattered_rounds_are_inconclusive(self, base: pytest.Pytester, word: str) -> None:
        def scatter(report: dict[str, Any]) -> None:
            for index, each in enumerate(report["records"][0]["rounds"]):
                each["energy_j"] *= (0.7, 1.4)[index % 2]

        edit("base.json", scatter)
        result = base.runpytest(COMPARE, FAIL, f"--energy-inconclusive={word}")
        result.assert_outcomes(passed=word != "fail", failed=word == "fail")
        result.stdout.fnmatch_lines(["inconclusive: test_some.py::test_a: *"])
        warning = "inconclusive: 1 of 1; a quieter machine or more rounds (--energy-rounds) can decide, *"
        if word == "warn":
            result.stdout.fnmatch_lines([warning])
        else:
            result.stdout.no_fnmatch_line(warning)
        if word == "fail":
            message = (
                "energy_gate: mean_power_w is inconclusive; a quieter machine or more rounds can decide *"
            )
            result.stdout.fnmatch_lines([message])

    def test_a_test_missing_in_an_interrupted_baseline_is_invalid(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["run"].update(complete=False))
        base.makepyfile(test_some=ONE.replace("test_a", "test_b").replace("0.05", "0.06"))
        result = base.runpytest(COMPARE, FAIL)
        result.assert_outcomes(failed=1)
        message = "*is invalid: missing in base.json, whose run did not finish"
        result.stdout.fnmatch_lines([message])

    def test_windows_and_interrupted_baselines_are_reported(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["run"].update(complete=False))
        window = "def test_w(energy_meter):\n    with energy_meter('x'):\n        time.sleep(0.1)\n"
        base.makepyfile(test_some="import time\n" + window)
        result = base.runpytest(COMPARE, "-q")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            [
                "base.json is from a run that did not finish; its remaining tests are missing",
                "not compared: 1 test with windows of energy_meter only",
            ]
        )

    def test_last_attempt_of_the_baseline_counts(self, base: pytest.Pytester) -> None:
        def rerun(report: dict[str, Any]) -> None:
            later = {**report["records"][0], "attempt": 2, "status": "failed", "reason": "flaky"}
            better = {**report["records"][0], "id": "test_some.py::test_z"}
            report["records"] = [later, *report["records"], better]

        edit("base.json", rerun)
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(["new: *: the baseline test failed (flaky)"])
