# SPDX-License-Identifier: Apache-2.0
"""The comment of a pull request: what comes first, what it says, and that no test id breaks out of it."""

from __future__ import annotations

import html
import re
from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.comparison import AppliedRule, ComparedReports, Comparison, ReportSource
from pytest_llenergy.report.markdown import escape_markdown
from pytest_llenergy.report.pr_comment import (
    MARKER,
    MAX_COMMENT_BYTES,
    CommentContext,
    render_comment,
)

from ..compare.runs import LEVEL, record_of, report_of, scaled

SIDE = ReportSource(origin="base.json", run_id="1", started_at="2026-01-02T03:04:05Z", complete=True)


def compared(*found: Comparison) -> ComparedReports:
    return ComparedReports(base=SIDE, head=SIDE, comparisons=list(found))


def comparison(name: str, verdict: str = "unchanged", **changes: object) -> Comparison:
    made = {"id": name, "metric": "energy_j", "unit": "J", "verdict": verdict, "reason": "because", **changes}
    return msgspec.convert(made, Comparison)


def test_the_comment_shows_verdicts_most_urgent_first() -> None:
    names = [f"benchmarks/test_decode.py::test_{word}" for word in ("same", "worse", "better")]
    base = report_of(*(record_of(name) for name in names))
    head = report_of(*(record_of(name, scaled(by)) for name, by in zip(names, (1, 1.1, 0.9), strict=True)))
    text = render_comment(compare_reports(base, head, ("base.json", "head.json"), [Criterion(gated=True)]))
    lines = text.splitlines()
    assert lines[0] == MARKER
    assert lines[1] == "### ❌ Energy: fail, 1 of 3 tests regressed (+10.0%); -0.3% over 3 tests"
    assert lines[2] == "1 regressed, 1 improved, 1 unchanged  "
    assert "<code>abc</code> (with changes) against <code>abc</code> (with changes)" in lines[3]
    assert "1x NVIDIA H100 700 W, nvml (measured)" in lines[3]
    assert re.search(r"noise 0\.\d% median, 0\.\d% at most$", lines[3])
    rows = [line for line in lines if line.startswith("| ") and "<code>" in line]
    assert [re.findall("test_[a-z]+", row)[-1] for row in rows] == ["test_worse", "test_better", "test_same"]
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells[0] == "🔴 regressed"
    assert cells[2:4] == ["625.3", "687.8 mJ/token"]
    assert cells[4] == "+10.0%"
    assert re.fullmatch(r"\+\d\.\d% … \+1\d\.\d%", cells[5])
    assert cells[6] == "8 → 8 (+0.0%)"
    assert cells[7] == "6 + 6"
    assert text.index("<details><summary>1 unchanged</summary>") > text.index("test_better")
    assert lines[-1] == (
        "Fails: regressed, not comparable, invalid; warns: worse, inconclusive, removed. Regressed: "
        "energy_per_output_token_j about 3% worse or more, and the lower limit above 1%. "
        "In rows with a change, base is a median of rounds and head is base times the estimated change; the "
        "title has the geometric mean of the changes."
    )


HOSTILE = [
    "t.py::t[a|b]",
    "t.py::t[`x` **b** _i_ ~~s~~]",
    "t.py::t[<script>alert(1)</script>]",
    "t.py::t[</code></details><img src=x onerror=alert(1)>]",
    "t.py::t[one\ntwo\r\nthree\u2028four]",
    "t.py::t[![x](http://evil.example/a.png)]",
    "t.py::t[https://evil.example www.evil.example]",
    "t.py::t[@octocat #1 org/repo#2]",
    "t.py::t[\\| \\\\]",
    "t.py::t[\u202etxt.exe\u202c]",
    "t.py::t[<!-- llenergy:compare -->]",
    "t.py::t[&lt;b&gt; &#124;]",
    "[x]: http://evil.example",
    "t.py::t[]]>\x00\x1b[31m]",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_id_stays_text_in_its_cell(name: str) -> None:
    found = [
        comparison(name, "regressed"),
        comparison("t.py::harmless", "invalid", reason=name, notes=[name]),
    ]
    text = render_comment(compared(*found))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1
    # No markup but our own.
    ours = re.sub(r"</?code>|<br>|<!-- llenergy:compare -->", "", text)
    assert not re.search(r"[<>`*~\\@!]|\]\(|://|www\.", ours.replace("**", ""))
    assert text.count(MARKER) == 1
    assert all(each.isprintable() or each == "\n" for each in text)


@pytest.mark.parametrize(
    "text", [*HOSTILE, "WWW.evil.example", "J |\n\n@octocat [x](https://evil.example)\n\n"]
)
def test_no_text_of_a_comparison_is_markup(text: str) -> None:
    """A fork may have written all of it: the file is of its run."""
    rule = AppliedRule(threshold=0.03, threshold_absolute=0.0, floor=0.01, tolerance=0.05, alpha=0.05)
    message = {"metric": text, "unit": text, "reason": text, "notes": [text], "differences": [text]}
    found = [
        comparison(text, verdict, base=1.0, head=2.0, rule=msgspec.to_builtins(rule), **message)
        for verdict in ("regressed", "unchanged", "inconclusive")
    ]
    side = ReportSource(origin=text, run_id=text, started_at=text, complete=True, branch=text)
    base = msgspec.structs.replace(side, commit=text)
    report = ComparedReports(base=base, head=side, comparisons=found, devices=[text], notes=[text])
    shown = render_comment(report)
    ours = re.sub(r"</?(code|details|summary)>|<br>|<!-- llenergy:compare -->|\*\*", "", shown)
    assert not re.search(r"[<>`*~\\@!]|\]\(|://|www\.", ours, re.IGNORECASE)
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize("origin", ["- a", "1. a", "[x]: a", "=== a", "    a"])
def test_the_name_of_a_report_cannot_start_a_markdown_block(origin: str) -> None:
    side = msgspec.structs.replace(SIDE, origin=origin)
    lines = render_comment(ComparedReports(base=side, head=side, comparisons=[])).splitlines()
    assert lines[3].startswith("<code>")


def test_rows_name_their_metric_once_there_are_several() -> None:
    both = comparison("t.py::test_m"), comparison("t.py::test_m", metric="mean_power_w")
    assert "mean_power_w |" not in render_comment(compared(both[1]))
    assert "test_m</code> mean_power_w |" in render_comment(compared(*both))


def test_ordinary_ids_stay_readable_and_unchanged() -> None:
    assert escape_markdown("benchmarks/test_decode.py::TestX::test_decode[8-int4]") == (
        "benchmarks/test_decode.py::TestX::test_decode[8-int4]"
    )
    for name in HOSTILE:
        shown = html.unescape(escape_markdown(name)).replace("\u200b", "")
        assert shown == "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode()
            for each in " ".join(name.split())
        )


def test_a_long_comment_is_cut_and_counts_what_was_omitted() -> None:
    found = [comparison(f"t.py::test_quiet[{'|' * 60}{i}]") for i in range(900)]
    found += [comparison(f"t.py::test_loud{i}", "regressed") for i in range(30)]
    text = render_comment(compared(*found))
    assert len(text.encode()) <= MAX_COMMENT_BYTES
    assert text.count("🔴 regressed") == 30
    kept = text.count("⚪ unchanged")
    assert 0 < kept < 900
    assert f"Cut to fit into a comment: {900 - kept} unchanged. All of them are in the JSON." in text
    assert text.splitlines()[2] == "30 regressed, 900 unchanged  "


def test_estimates_and_interrupted_runs_are_labelled() -> None:
    meters = [msgspec.structs.replace(each, kind="estimated") for each in record_of().meters]
    base = report_of(record_of(meters=meters), complete=False)
    head = report_of(record_of(joules=scaled(1.2, LEVEL), meters=meters))
    text = render_comment(compare_reports(base, head, ("base.json", "head.json"), [Criterion()]))
    assert "| estimated |" in text
    assert "**base.json is from a run that did not finish; its remaining tests are missing**" in text


def test_a_certain_small_change_is_shown_open_and_a_removed_test_without_figures() -> None:
    numbers: dict[str, Any] = {
        "base": 10.0,
        "head": 10.2,
        "ratio": 1.02,
        "low": 1.015,
        "high": 1.025,
        "gated": True,
    }
    found = [
        comparison("t.py::test_small", "worse", **numbers),
        comparison("t.py::test_gone", "removed", base=7.77, reason="only in the baseline", gated=True),
        comparison("t.py::test_same", **{**numbers, "ratio": 1.0}),
    ]
    text = render_comment(compared(*found))
    title = "### ⚠️ Energy: warning, 1 of 3 tests worse (+2.0%), 1 removed; +1.0% over 2 tests"
    assert text.splitlines()[1] == title
    strict = render_comment(msgspec.structs.replace(compared(*found), inconclusive="fail"))
    title = "### ❌ Energy: fail, 1 of 3 tests removed; +1.0% over 2 tests"
    assert strict.splitlines()[1] == title
    assert text.index("test_small") < text.index("<details>") < text.index("test_same")


def test_a_comparison_without_tests_has_a_title() -> None:
    assert render_comment(compared()).splitlines()[1] == "### ❌ Energy: fail, nothing was compared"


def test_what_is_not_judged_is_not_titled_a_pass() -> None:
    def title(policy: str, *, gated: bool) -> str:
        numbers: dict[str, Any] = {"base": 10.0, "head": 10.4, "ratio": 1.04, "gated": gated}
        found = [comparison(f"t.py::{each}", each, **numbers) for each in ("inconclusive", "unchanged")]
        side = msgspec.structs.replace(compared(*found), inconclusive=policy)
        return render_comment(side).splitlines()[1]

    overall = "; +4.0% over 2 tests"
    assert title("pass", gated=True) == f"### ✅ Energy: pass, 1 of 2 tests inconclusive{overall}"
    assert (
        title("warn", gated=False)
        == f"### ⚖️ Energy: no gate, 1 of 2 tests inconclusive, 1 unchanged{overall}"
    )


def test_a_baseline_that_failed_is_no_pass() -> None:
    reason = "the baseline test failed (boom)"
    found = (
        comparison("t.py::a", "new", reason=reason, base_status="failed"),
        comparison("t.py::b", gated=True),
    )
    titles = [render_comment(compared(*each)).splitlines()[1] for each in (found[:1], found)]
    title = "### ⚠️ Energy: warning, 1 test failed or skipped in the baseline"
    assert titles == [
        "### ❌ Energy: fail, 1 test failed or skipped in the baseline, nothing was compared",
        title,
    ]
    assert reason in render_comment(compared(*found))


def test_notes_do_not_fill_the_comment() -> None:
    noted = msgspec.structs.replace(compared(comparison("t.py::t", gated=True)), notes=["x" * 400] * 400)
    text = render_comment(noted)
    assert len(text.encode()) < MAX_COMMENT_BYTES
    assert "**and 390 more notes, in the JSON**" in text


@pytest.mark.parametrize(
    ("pairs", "said"), [("12", " · 12 pairs"), ("6+6", " · up to 12 pairs"), ("<b>", " · 0 pairs")]
)
def test_the_pairs_are_those_of_all_stages(pairs: str, said: str) -> None:
    text = render_comment(compared(), CommentContext(pairs=pairs))
    assert text.splitlines()[3].endswith(said)


def test_links_that_are_no_addresses_are_left_out() -> None:
    odd = CommentContext(
        run_url="https://a.example/1) [x](http://b", report_url="https://a.example/1#artifacts"
    )
    text = render_comment(compared(), odd)
    assert "[HTML report and JSON](https://a.example/1#artifacts)\n" in text
    assert "b.example" not in text
    assert "CI run" not in text
