# SPDX-License-Identifier: Apache-2.0
"""Comparing two reports: verdicts, and every reason for having none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import exit_code
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import ComparedReports, Comparison, ReportSource
from pytest_llenergy.record.load_curve import MaxLoad
from pytest_llenergy.record.record import Flag, Metric, Record
from pytest_llenergy.record.report import Report

from .runs import LEVEL, SPOILED, TEST, record_of, report_of, round_of, scaled

PER_TOKEN = "energy_per_output_token_j"


def compared(base: Report, head: Report, asked: Criterion | None = None, **how: Any) -> ComparedReports:
    return compare_reports(base, head, ("base.json", "head.json"), [asked or Criterion(gated=True)], **how)


def one(base: Record, head: Record, metric: str | None = None, **how: Any) -> Comparison:
    (found,) = compared(report_of(base), report_of(head), Criterion(metric, gated=True), **how).comparisons
    return found


def code(*comparisons: Comparison, inconclusive: Any = "warn") -> int:
    side = ReportSource("base.json", "1", "2026-01-01T00:00:00Z", complete=True)
    return exit_code(ComparedReports(side, side, list(comparisons), inconclusive=inconclusive))


def test_default_metric_is_joules_per_token_if_tokens_are_counted() -> None:
    assert one(record_of(), record_of()).metric == PER_TOKEN
    silent = [round_of(each, tokens=None) for each in LEVEL]
    assert one(record_of(rounds=silent), record_of(rounds=silent)).metric == "energy_j"


def test_test_on_one_side_is_new_or_removed() -> None:
    other = "benchmarks/test_decode.py::test_other"
    found = compared(report_of(record_of()), report_of(record_of(other, params={}))).comparisons
    assert [(each.id, each.verdict, each.reason) for each in found] == [
        (other, "new", "not in the baseline"),
        (TEST, "removed", "only in the baseline"),
    ]
    assert code(*found) == 5, "nothing was judged"
    both = compared(report_of(record_of()), report_of(record_of(), record_of(other))).comparisons
    assert [each.verdict for each in both] == ["unchanged", "new"]
    assert code(*both) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "failed", "reason": "AssertionError: no"}, "the {test} test failed (AssertionError: no)"),
        ({"status": "crashed", "reason": None}, "the {test} test crashed"),
        ({"status": "invalid", "reason": "GPU is lost"}, "the {test} test is invalid (GPU is lost)"),
        ({"rounds": []}, "{side} has only windows of energy_meter and no rounds to compare"),
        (
            {"rounds": [round_of(each, flags=[SPOILED]) for each in LEVEL]},
            "{side} has no energy_j: the counter ran backwards",
        ),
        ({"joules": [None] * 6}, "{side} has no energy_j: the counter stood still"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("side", ["base", "head"])
def test_missing_measurement_is_invalid(side: str, changes: dict[str, Any], reason: str) -> None:
    broken, whole = record_of(**changes), record_of()
    found = one(broken, whole, "energy_j") if side == "base" else one(whole, broken, "energy_j")
    new = side == "base" and changes.get("status") in ("failed", "crashed")
    assert (found.verdict, found.reason) == (
        "new" if new else "invalid",
        reason.format(side=side, test={"base": "baseline"}.get(side, side)),
    )
    assert (found.ratio, found.low, found.high) == (None, None, None)
    # Nothing was compared.
    assert code(found) == 5


def test_skipped_test_is_invalid_on_the_head_and_new_after_the_baseline() -> None:
    skipped = record_of(status="skipped", reason="no GPU")
    found = [one(record_of(), skipped), one(skipped, record_of()), one(skipped, skipped)]
    assert [(each.verdict, each.gated) for each in found] == [
        ("invalid", True),
        ("new", False),
        ("invalid", False),
    ]
    assert (found[1].reason, found[1].base_status) == ("the baseline test was skipped (no GPU)", "skipped")
    assert found[0].reason == "the head test was skipped (no GPU)"


def test_test_that_failed_only_its_gate_is_compared() -> None:
    failed = record_of(joules=scaled(1.1), status="failed", reason="energy_gate: …", failed_gate=True)
    assert one(record_of(), failed).verdict == "regressed"


def test_invalid_rounds_are_left_out() -> None:
    wild = [*(round_of(each) for each in LEVEL), round_of(500.0, flags=[SPOILED])]
    found = one(record_of(), record_of(rounds=wild))
    assert (found.verdict, found.n_head) == ("unchanged", 6)


def test_measurement_and_estimate_are_not_comparable() -> None:
    meters = [msgspec.structs.replace(each, kind="estimated") for each in record_of().meters]
    found = one(record_of(), record_of(joules=scaled(2.0), meters=meters))
    assert (found.verdict, found.reason) == ("not comparable", "base is measured, head is estimated")
    assert found.differences == ["meter.kind: measured -> estimated"]
    assert code(found) == 3
    both = one(record_of(meters=meters), record_of(joules=scaled(2.0), meters=meters))
    assert (both.verdict, both.kind) == ("regressed", "estimated")
    # Joules that have one value for all rounds too.
    per_flop = {"energy_per_flop_j": Metric(value=1e-9, unit="J", n=6)}
    found = one(record_of(metrics=per_flop), record_of(metrics=per_flop, meters=meters), *per_flop)
    assert (found.verdict, found.reason) == ("not comparable", "base is measured, head is estimated")


def test_joules_split_on_a_busy_host_are_comparable_with_such_joules_only() -> None:
    split = Flag(name="attributed", severity="note", detail="others used 2 of 4 CPU s")
    busy = record_of(rounds=[round_of(each, flags=[split]) for each in LEVEL])
    found = one(record_of(), busy)
    assert (found.verdict, found.reason) == (
        "not comparable",
        "base is measured, head is attributed: others used the CPUs of one of them",
    )
    both = one(busy, busy)
    assert (both.verdict, both.kind_label) == ("unchanged", " (attributed)")
    mostly_quiet = record_of(
        rounds=[round_of(each, flags=[split] if each == LEVEL[0] else []) for each in LEVEL]
    )
    assert one(record_of(), mostly_quiet).verdict == "unchanged"


def test_different_workload_is_compared_only_with_across() -> None:
    head = record_of(joules=scaled(1.1), params={"batch_size": 9})
    found = one(record_of(), head)
    assert found.verdict == "not comparable"
    assert found.reason.startswith("different workload (params.batch_size: 8 -> 9; ")
    across = one(record_of(), head, across=True)
    assert across.verdict == "regressed"
    assert "different workload: params.batch_size: 8 -> 9" in across.notes


def test_last_attempt_counts() -> None:
    base = report_of(record_of())
    tries = [
        record_of(attempt=2, joules=LEVEL),
        record_of(attempt=1, status="failed", reason="flaky"),
        record_of(attempt=3, joules=scaled(1.2)),
    ]
    (found,) = compared(base, report_of(*tries)).comparisons
    assert found.verdict == "regressed"


def test_report_with_duplicate_records_is_refused() -> None:
    twice = report_of(record_of(), record_of(joules=scaled(1.2)))
    for reports, origin in (
        ((twice, report_of(record_of())), "base"),
        ((report_of(record_of()), twice), "head"),
    ):
        with pytest.raises(ReportError) as caught:
            compared(*reports)
        assert str(caught.value) == (
            f"{origin}.json: {TEST} has two records of attempt 1; write one report per run, or combine "
            "runs with llenergy merge"
        )


def test_metric_missing_on_both_sides_gates_only_tests_with_a_mark() -> None:
    silent = record_of(rounds=[round_of(each, tokens=None) for each in LEVEL])
    (shared,) = compared(report_of(silent), report_of(silent), Criterion(PER_TOKEN, gated=True)).comparisons
    assert (shared.verdict, shared.reason, shared.gated) == (
        "no value",
        "no output tokens (count yours: energy(fn, output_tokens=...))",
        False,
    )
    own = Criterion(PER_TOKEN, gated=True, from_mark=True)
    (asked,) = compared(report_of(silent), report_of(silent), own).comparisons
    assert (asked.verdict, asked.gated) == ("invalid", True)
    (lost,) = compared(
        report_of(record_of()), report_of(silent), Criterion(PER_TOKEN, gated=True)
    ).comparisons
    assert lost.verdict != "unchanged"
    assert lost.gated


def test_metric_that_only_the_head_has_is_new() -> None:
    def served(latency_s: float | None) -> Report:
        rounds = [round_of(each) for each in LEVEL]
        return report_of(
            record_of(
                rounds=[msgspec.structs.replace(each, time_to_first_token_s=latency_s) for each in rounds]
            )
        )

    criterion = Criterion("time_to_first_token_s", gated=True)
    (found,) = compared(served(None), served(0.1), criterion).comparisons
    assert (found.verdict, found.reason) == ("new", "the baseline has no time_to_first_token_s")
    (lost,) = compared(served(0.1), served(None), criterion).comparisons
    assert (lost.verdict, lost.gated) == ("invalid", True)
    assert lost.reason == "head has no time_to_first_token_s: no token timestamps"


def test_lone_weak_change_among_many_tests_is_inconclusive() -> None:
    """Four rounds per side cannot give a p-value that is significant among many comparisons."""
    still = [record_of(f"t.py::test_{i}", joules=LEVEL[:4]) for i in range(11)]
    worse = record_of("t.py::test_x", joules=scaled(1.1, LEVEL[:4]))
    base = report_of(*still, record_of("t.py::test_x", joules=LEVEL[:4]))
    found = compared(base, report_of(*still, worse)).comparisons
    alone = one(record_of("t.py::test_x", joules=LEVEL[:4]), worse)
    assert alone.verdict == "regressed"
    assert found[-1].verdict == "inconclusive"
    assert "among 12 comparisons" in found[-1].reason


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(0.8, "regressed"), (1.25, "improved"), (0.96, "inconclusive"), (1.0, "unchanged")],
)
def test_maximum_loads_are_compared_within_their_brackets(change: float, verdict: str) -> None:
    """Six rounds hold the result of one search: they agree, and are no more certain than it is."""

    def searched(maximum: float, u: float) -> Record:
        found = MaxLoad(requests_per_s=maximum, u_requests_per_s=u)
        return record_of(rounds=[round_of(10.0, max_load=found)] * 6)

    u = 0.0 if change == 1.0 else 0.25
    found = one(searched(10.0, u), searched(10.0 * change, u), "max_load_requests_per_s")
    assert (found.verdict, found.better) == (verdict, "more")
