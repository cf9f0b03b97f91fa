# SPDX-License-Identifier: Apache-2.0
"""A regressed test fails in its call phase, through the gate of the run or of its mark."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import json_schema

from .inner import COMPARE, FAIL, MARKED, ONE, TWO, edit, with_b

Read = Callable[..., dict[str, Any]]


class TestRegressed:
    @pytest.mark.clock
    @pytest.mark.parametrize(
        ("code", "count", "workers"),
        [
            pytest.param(ONE, 1, "-n0", id="controller", marks=pytest.mark.slow),
            pytest.param(ONE, 1, "-n1", id="worker"),
            pytest.param(TWO, 2, "-n2", id="workers", marks=pytest.mark.slow),
        ],
    )
    def test_a_regressed_test_fails_in_its_call_phase_where_it_was_measured(
        self,
        suite: pytest.Pytester,
        monkeypatch: pytest.MonkeyPatch,
        read_report: Read,
        code: str,
        count: int,
        workers: str,
    ) -> None:
        suite.makepyfile(test_some=code)
        suite.runpytest("--energy-report=base.json").assert_outcomes(passed=count)
        monkeypatch.setenv("WATTS", "13")
        result = suite.runpytest(COMPARE, FAIL, "--energy-report", "--junitxml=junit.xml", workers)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert result.parseoutcomes()["failed"] == count
        result.stdout.fnmatch_lines(
            [
                "*energy_gate: mean_power_w regressed, * -> * W: *%, at least *%*",
                "*= energy, compared with base.json =*",
                "test_a *regressed * W *+*% *",
                f"{count} regressed; noise *",
            ]
        )
        report = read_report()
        jsonschema.validate(report, json_schema())
        assert report["baseline"]["side"]["origin"] == "base.json"
        for record in report["records"]:
            assert (record["status"], record["failed_gate"]) == ("failed", True)
            (found,) = record["comparisons"]
            assert (found["id"], found["verdict"], found["gated"]) == (record["id"], "regressed", True)
            assert 1.01 < found["low"] <= found["ratio"] <= found["high"]
        root = ElementTree.parse("junit.xml").getroot()
        messages = [each.get("message", "") for each in root.iter("failure")]
        assert len(messages) == count
        assert all(each.startswith("Failed: energy_gate: mean_power_w regressed") for each in messages)
        properties = {each.get("name"): each.get("value") for each in root.iter("property")}
        assert properties["llenergy.mean_power_w.verdict"] == "regressed"

    def test_a_regression_is_explained_and_listed(self, base: pytest.Pytester) -> None:
        result = base.runpytest(COMPARE, FAIL)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: mean_power_w regressed, 10 -> 11.01 W: +10.0%, at least +6.2%",
                "test_a  regressed    10  11.01 W  +10.0%  +6.2% … +13.9% * 7.5%",
                "1 regressed; noise 0.*% median, 0.*% at most",
            ]
        )

    def test_x_stops_at_a_regression_and_lf_reruns_it(self, base: pytest.Pytester) -> None:
        edit("base.json", with_b)
        base.makepyfile(test_some=TWO)
        base.makeini(Path("tox.ini").read_text())
        assert base.runpytest(COMPARE, FAIL, "-x").parseoutcomes() == {"failed": 1}
        again = base.runpytest(COMPARE, FAIL, "--lf", "-x")
        assert again.parseoutcomes() == {"failed": 1}
        again.stdout.fnmatch_lines(["run-last-failure: rerun previous 1 failure*"])

    def test_xfail_covers_a_regression(self, base: pytest.Pytester) -> None:
        base.makepyfile(test_some=MARKED.format("xfail(strict=True)"))
        base.runpytest(COMPARE, FAIL).assert_outcomes(xfailed=1)

    @pytest.mark.parametrize(("absolute", "failed"), [("2W", 0), ("500mW", 1)])
    def test_absolute_part_of_a_threshold_must_be_exceeded_too(
        self, base: pytest.Pytester, absolute: str, failed: int
    ) -> None:
        base.runpytest(COMPARE, f"{FAIL}+{absolute}").assert_outcomes(passed=1 - failed, failed=failed)

    @pytest.mark.parametrize(("floor", "verdict"), [("2%", "regressed"), ("25%", "unchanged")])
    def test_change_below_the_floor_is_unchanged(
        self, base: pytest.Pytester, floor: str, verdict: str
    ) -> None:
        result = base.runpytest(COMPARE, f"--energy-floor={floor}")
        result.stdout.fnmatch_lines([f"1 {verdict}; noise *"])

    def test_report_of_a_failed_gate_can_be_compared_later(
        self, base: pytest.Pytester, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base.runpytest(COMPARE, FAIL, "--energy-report=head.json").assert_outcomes(failed=1)
        capsys.readouterr()
        assert main(["compare", "base.json", "head.json", "--metric=mean_power_w"]) == 1
        assert "1 regressed" in capsys.readouterr().out


class TestMark:
    def test_threshold_of_the_mark_overrides_the_option(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='mean_power_w', threshold='25%')"
        base.makepyfile(test_some=MARKED.format(mark))
        base.runpytest(COMPARE, FAIL).assert_outcomes(passed=1)

    def test_budget_and_threshold_both_apply(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='mean_power_w', budget='1 W', threshold='3%')"
        base.makepyfile(test_some=MARKED.format(mark))
        result = base.runpytest(COMPARE)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: mean_power_w is * W, over the budget of 1 W",
                "energy_gate: mean_power_w regressed, *",
            ]
        )

    def test_threshold_without_a_baseline_is_reported_as_not_gated(
        self, quick_suite: pytest.Pytester, read_report: Read
    ) -> None:
        quick_suite.makepyfile(test_some=MARKED.format("energy_gate(threshold='3%')"))
        result = quick_suite.runpytest("--energy-report", "-q")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["not gated: 1 test, no baseline was given (--energy-compare)"])
        (found,) = read_report()["records"][0]["comparisons"]
        assert (found["verdict"], found["reason"]) == ("new", "no baseline was given (--energy-compare)")

    def test_gate_on_a_missing_metric_fails(self, base: pytest.Pytester) -> None:
        mark = "energy_gate(metric='output_tokens_per_s', threshold='3%')"
        base.makepyfile(test_some=MARKED.format(mark))
        result = base.runpytest(COMPARE)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "energy_gate: output_tokens_per_s is invalid: base has no "
                "output_tokens_per_s: no output tokens (count yours: energy(fn, output_tokens=...))"
            ]
        )
