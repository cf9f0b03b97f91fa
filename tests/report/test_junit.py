# SPDX-License-Identifier: Apache-2.0
"""JUnit XML, as a reader of it sees it."""

from __future__ import annotations

from pathlib import Path

import junitparser
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report

from ..compare.runs import record_of, report_of, scaled
from .forms import shown
from .test_pr_comment import compared, comparison


def cases(text: str) -> list[junitparser.TestCase]:
    return [case for suite in junitparser.JUnitXml.fromstring(text.encode()) for case in suite]


def facts(case: junitparser.TestCase) -> dict[str, str]:
    return {each.name: each.value for each in case.child(junitparser.Properties)}


def test_a_regression_is_a_failure_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.json").write_bytes(encode_report(report_of(record_of())))
    Path("head.json").write_bytes(encode_report(report_of(record_of(joules=scaled(1.1)))))
    assert main(["compare", "base.json", "head.json", "--metric=energy_j", "--format=junit"]) == 1
    text = capsys.readouterr().out
    document = junitparser.JUnitXml.fromstring(text.encode())
    assert (document.tests, document.failures, document.errors, document.skipped) == (1, 1, 0, 0)
    (case,) = cases(text)
    assert (case.classname, case.name) == ("benchmarks.test_decode", "test_decode[8] energy_j")
    (failure,) = case.result
    assert isinstance(failure, junitparser.Failure)
    assert failure.message.startswith("energy_j regressed: +10.0%, at least +")
    reported = facts(case)
    assert reported["llenergy.verdict"] == "regressed"
    assert float(reported["llenergy.low"]) < float(reported["llenergy.ratio"]) == pytest.approx(1.1)
    assert reported["llenergy.kind"] == "measured"


@pytest.mark.parametrize(
    ("verdict", "gated", "result"),
    [
        ("unchanged", True, None),
        ("improved", True, None),
        ("regressed", True, junitparser.Failure),
        ("regressed", False, junitparser.Skipped),
        ("not comparable", True, junitparser.Error),
        ("invalid", True, junitparser.Error),
        ("invalid", False, junitparser.Skipped),
        ("inconclusive", True, junitparser.Skipped),
        ("new", True, junitparser.Skipped),
        ("removed", True, junitparser.Error),
        ("removed", False, junitparser.Skipped),
    ],
)
def test_each_verdict_maps_to_a_junit_outcome(verdict: str, gated: bool, result: type | None) -> None:
    (case,) = cases(shown(compared(comparison("a/t.py::T::t", verdict, gated=gated)), "junit"))
    assert case.classname == "a.t.T"
    assert [type(each) for each in case.result] == ([] if result is None else [result])
    assert facts(case) == {"llenergy.metric": "energy_j", "llenergy.verdict": verdict, "llenergy.unit": "J"}


def test_no_test_id_breaks_the_document() -> None:
    hostile = "t.py::t[<a>&\"'\x1b[0m\x00]]>\ufffe]"
    (case,) = cases(shown(compared(comparison(hostile, "invalid", gated=True, reason=hostile)), "junit"))
    assert case.name == r"""t[<a>&"'\x1b[0m\x00]]>\ufffe] energy_j"""
