# SPDX-License-Identifier: Apache-2.0
"""Saving and naming baselines, and usage errors for unusable ones before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .inner import COMPARE, FAIL, ONE, edit, usage_error


class TestUsage:
    """One line and exit code 4, before anything is measured."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "{path}: No such file or directory"),
            (
                '{"schema_version": 99}',
                "{path}: schema version 99 is newer than 1, the newest this pytest-llenergy reads; "
                "upgrade pytest-llenergy",
            ),
        ],
        ids=["missing", "newer"],
    )
    def test_unreadable_baseline_is_a_usage_error(
        self, suite: pytest.Pytester, content: str | None, message: str
    ) -> None:
        if content is not None:
            Path("base.json").write_text(content)
        expected = message.format(path=suite.path / "base.json")
        assert usage_error(suite, COMPARE, "-n2") == f"{COMPARE}: {expected}"

    def test_baseline_without_measurements_is_a_usage_error(self, base: pytest.Pytester) -> None:
        def failed(report: dict[str, Any]) -> None:
            for record in report["records"]:
                record["status"] = "failed"

        edit("base.json", failed)
        path = base.path / "base.json"
        message = (
            f"{COMPARE}: {path}: none of its {{}}; a baseline needs tests that pass, with measured rounds"
        )
        assert usage_error(base, COMPARE) == message.format("1 tests can be compared with (1 failed)")
        edit("base.json", lambda report: report["records"].clear())
        edit("base.json", lambda report: report["run"].update(complete=False))
        assert usage_error(base, COMPARE) == message.format("0 tests can be compared with")

    def test_baseline_with_a_duplicate_test_is_a_usage_error(self, base: pytest.Pytester) -> None:
        edit("base.json", lambda report: report["records"].append(report["records"][0]))
        assert usage_error(base, COMPARE) == (
            f"{COMPARE}: {base.path}/base.json: test_some.py::test_a has two records of attempt 1; write one "
            "report per run, or combine runs with llenergy merge"
        )

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("mean_power_w", "'mean_power_w' is not METRIC:PERCENT%, such as 'energy_j:3%' or *"),
            ("energyj:3%", "unknown metric 'energyj'*"),
            (
                "energy_j:-3%",
                "invalid threshold '-3%' of energy_j; expected a percentage, such as '3%' or '3%+2J'",
            ),
            (
                "energy_j:3%+2W",
                "invalid threshold '3%+2W' of energy_j; expected a percentage, such as *",
            ),
            (
                "peak_memory_bytes:3%",
                "peak_memory_bytes has one value per test and cannot be compared; *",
            ),
        ],
    )
    def test_invalid_threshold_is_a_usage_error(
        self, base: pytest.Pytester, option: str, message: str
    ) -> None:
        base.makepyfile(test_some="raise SystemExit('collected')")
        result = base.runpytest(COMPARE, f"--energy-fail-on={option}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --energy-fail-on={option}: {message}"])

    def test_report_does_not_overwrite_the_baseline(self, base: pytest.Pytester) -> None:
        before = Path("base.json").read_bytes()
        message = usage_error(base, COMPARE, "--energy-report=base.json")
        assert message.startswith("--energy-report")
        assert message.endswith("this would replace the baseline base.json; write to another name")
        assert Path("base.json").read_bytes() == before


class TestSave:
    def test_saved_name_can_be_compared(
        self, quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quick_suite.makepyfile(ONE)
        saved = quick_suite.runpytest("--energy-save=main")
        saved.stdout.fnmatch_lines(["energy report: .llenergy/main.json"])
        assert [each.name for each in (quick_suite.path / ".llenergy").iterdir()] == ["main.json"]
        monkeypatch.setenv("WATTS", "11")
        monkeypatch.chdir(quick_suite.mkdir("elsewhere"))
        result = quick_suite.runpytest("..", "--energy-compare=main", FAIL)
        result.assert_outcomes(failed=1)

    def test_save_and_report_in_one_run(self, quick_suite: pytest.Pytester) -> None:
        quick_suite.makepyfile(ONE)
        quick_suite.runpytest("--energy-save=main", "--energy-report=energy.json").assert_outcomes(passed=1)
        assert Path("energy.json").read_bytes() == Path(".llenergy/main.json").read_bytes()

    def test_unsaved_name_is_a_usage_error(self, quick_suite: pytest.Pytester) -> None:
        none = usage_error(quick_suite, "--energy-compare=main")
        assert none == (
            "--energy-compare=main: there is no .llenergy/main.json; nothing is saved in "
            f"{quick_suite.path}/.llenergy (--energy-save=main writes it; the name of a file ends in .json)"
        )
        quick_suite.mkdir(".llenergy")
        Path(".llenergy/other.json").touch()
        assert "; saved: other (" in usage_error(quick_suite, "--energy-compare=main")

    def test_the_journal_of_a_killed_run_is_named(self, quick_suite: pytest.Pytester) -> None:
        quick_suite.mkdir(".llenergy")
        Path(".llenergy/main.20260102T030405-a1b2c3.journal.jsonl").touch()
        assert usage_error(quick_suite, "--energy-compare=main") == (
            "--energy-compare=main: there is no .llenergy/main.json, only the journal of a killed or running "
            "run; llenergy merge .llenergy/main.20260102T030405-a1b2c3.journal.jsonl -o .llenergy/main.json "
            "writes it"
        )

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("a/b", "needs a plain name, such as main"),
            ("main.json", "needs a plain name, such as main"),
            ("..", "needs a plain name, such as main"),
            ("", "has no value"),
        ],
    )
    def test_invalid_name_is_a_usage_error(
        self, quick_suite: pytest.Pytester, name: str, reason: str
    ) -> None:
        assert reason in usage_error(quick_suite, f"--energy-save={name}")
