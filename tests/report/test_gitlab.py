# SPDX-License-Identifier: Apache-2.0
"""The metrics report: what is unchanged is the same text in every pipeline."""

from __future__ import annotations

import math
import shlex

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports

from ..compare.runs import UNSURE, record_of, report_of, scaled
from .forms import shown
from .test_pr_comment import compared, comparison


def report(factor: float) -> str:
    base = report_of(record_of("t.py::same"), record_of("t.py::other"), record_of("t.py::few", UNSURE))
    head = report_of(
        record_of("t.py::same", scaled(1.002)),
        record_of("t.py::other", scaled(factor)),
        record_of("t.py::few", UNSURE),
        record_of("t.py::new"),
    )
    return shown(compare_reports(base, head, ("a", "b"), [Criterion(gated=True)]), "gitlab")


def as_gitlab_reads_it(text: str) -> dict[str, str]:
    """As ``ee/lib/gitlab/ci/parsers/metrics/generic.rb``: no comments, words of a shell, strings."""
    found = {}
    for line in text.splitlines():
        words = shlex.split(line.partition("#")[0])
        if len(words) > 1:
            found[words[0]] = words[1]
    return found


def test_openmetrics_output_is_read_by_the_reference_parser() -> None:
    families = {family.name: family for family in parse(report(1.1))}
    changes = {sample.labels["test"]: sample.value for sample in families["llenergy_change_ratio"].samples}
    assert families["llenergy_change_ratio"].unit == "ratio"
    assert math.isnan(changes.pop("t.py::few"))
    assert changes == {"t.py::same": 0.0, "t.py::other": 0.1}
    counts = {each.labels["verdict"]: each.value for each in families["llenergy_comparisons"].samples}
    assert {state: count for state, count in counts.items() if count} == {
        "regressed": 1,
        "inconclusive": 1,
        "unchanged": 1,
        "new": 1,
    }


def test_unchanged_tests_have_identical_text() -> None:
    before, after = report(0.997), report(1.1)
    changed = {line for line in after.splitlines() if line not in before.splitlines()}
    assert {line.partition("{")[2] for line in changed} == {
        'verdict="regressed"} 1',
        'verdict="unchanged"} 1',
        'test="t.py::other",metric="energy_per_output_token_j"} +0.100',
    }


def test_no_test_id_is_lost_by_gitlab() -> None:
    hostile = 't.py::t["a b" #1 \\ \'x\n]'
    text = shown(compared(comparison(hostile, "regressed", ratio=1.04)), "gitlab")
    found = as_gitlab_reads_it(text)
    (name,) = [each for each in found if each.startswith("llenergy_change_ratio{")]
    assert found[name] == "+0.040"
    (family,) = [each for each in parse(text) if each.name == "llenergy_change_ratio"]
    assert family.samples[0].labels["test"] == hostile.replace("#", "%23")
