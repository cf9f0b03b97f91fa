# SPDX-License-Identifier: Apache-2.0
"""Comparisons and gates of served loads, of which the server could not keep up with some."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import exit_code, list_failures
from pytest_llenergy.record.comparison import ComparedReports
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Flag, Phase, Record, Round
from pytest_llenergy.record.served import ServedRequests, TokenGaps

from .runs import LEVEL, record_of, report_of, round_of

STEADY = "steady_energy_per_output_token_j"
FLAG = Flag(name="saturated", severity="warning", detail="asked for 20 requests/s, achieved 6.8")


def served_round(energy_j: float, *, saturated: bool = False) -> Round:
    served = ServedRequests(
        sent_s=[0.0, 0.1],
        time_to_first_token_s=[0.1, 0.1],
        end_to_end_latency_s=[0.5, 0.5],
        output_tokens=[8, 8],
        time_per_output_token_s=[0.05, 0.05],
        token_gaps=TokenGaps(gap_s=[0.05], count=[14]),
    )
    steady = Phase(name="steady", duration_s=1.0, energy_j=energy_j / 2, energy_u_j=0.001, output_tokens=8)
    phases, flags = ([], [FLAG]) if saturated else ([steady], [])
    return round_of(energy_j, served=served, phases=phases, flags=flags)


def load_record(saturated: Sequence[bool] = (False,) * 6) -> Record:
    rounds = [served_round(j, saturated=each) for j, each in zip(LEVEL, saturated, strict=True)]
    return record_of(rounds=rounds)


STEADILY, OVERLOADED = load_record(), load_record((True,) * 6)


def compared(
    base: Record, head: Record, metric: str | None = STEADY, *, across: bool = False
) -> ComparedReports:
    criteria = [Criterion(metric, gated=True)]
    return compare_reports(report_of(base), report_of(head), ("base", "head"), criteria, across=across)


def test_a_gate_on_a_steady_metric_passes_while_both_sides_keep_up() -> None:
    found = compared(STEADILY, STEADILY)
    assert [each.verdict for each in found.comparisons] == ["unchanged"]
    assert exit_code(found) == 0


@pytest.mark.parametrize("name", ["ended-early", "refused"])
def test_a_part_of_a_load_is_not_comparable(name: str) -> None:
    """A search without a result may have only such rounds; even two of them are different parts."""
    flag = Flag(name=name, severity="warning", detail="the load ended after 9 of 100 requests")
    rounds = [round_of(joules, flags=[flag], requests=None, tokens=None) for joules in LEVEL]
    cut = record_of(rounds=rounds)
    for base, head, side in ((STEADILY, cut, "head"), (cut, cut, "base")):
        (only,) = compared(base, head, "energy_j").comparisons
        assert only.verdict == "not comparable"
        assert f"a load of {side} {name}: the load ended after 9 of 100 requests" in only.reason


@pytest.mark.parametrize("metric", [STEADY, "energy_per_output_token_j", None])
@pytest.mark.parametrize(
    ("base", "head", "side"), [(STEADILY, OVERLOADED, "head"), (OVERLOADED, STEADILY, "base")]
)
def test_a_saturated_side_is_not_comparable_with_one_that_kept_up(
    base: Record, head: Record, side: str, metric: str | None
) -> None:
    found = compared(base, head, metric)
    (only,) = found.comparisons
    assert only.verdict == "not comparable"
    assert f"only {side} is saturated (asked for 20 requests/s, achieved 6.8)" in only.reason
    assert exit_code(found) == 3
    assert len(list_failures(found.comparisons, "pass")) == 1


def test_a_gate_on_a_steady_metric_of_saturated_sides_does_not_pass() -> None:
    found = compared(OVERLOADED, OVERLOADED)
    (only,) = found.comparisons
    assert only.verdict == "invalid"
    assert f"base has no {STEADY}: 6 of 6 rounds: saturated: asked for 20" in only.reason
    assert exit_code(found) != 0
    # What a whole load takes can still be compared.
    assert exit_code(compared(OVERLOADED, OVERLOADED, "energy_j")) == 0


def test_one_saturated_round_voids_the_steady_metrics_of_a_test() -> None:
    """Its other rounds alone would be another metric: 4.94 J/token from one round beside 1.56 overall."""
    one = load_record((False, True, False, False, False, False))
    metrics = compute_metrics(one.rounds, None)
    for name in (STEADY, "steady_output_tokens_per_s"):
        assert metrics[name].value is None
        assert metrics[name].reason == f"1 of 6 rounds: saturated: {FLAG.detail}"
    assert metrics["energy_per_output_token_j"].value is not None
    (only,) = compared(STEADILY, one).comparisons
    assert only.verdict == "invalid"


GOOD, NONE = [True, True], [False, False]


def slo_record(*good: Sequence[bool]) -> Record:
    rounds = [served_round(joules) for joules in LEVEL]
    marked = [
        msgspec.structs.replace(each, served=msgspec.structs.replace(each.served, good=list(flags)))
        for each, flags in zip(rounds, good, strict=True)
        if each.served is not None
    ]
    return record_of(rounds=marked)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("goodput_requests_per_s", "the test serves no load with slo="),
        ("energy_per_good_request_j", "the test serves no load with slo="),
        ("max_load_requests_per_s", "the test has no energy.max_load"),
        (STEADY, "the test serves no load"),
        ("requests_per_s", "the test serves no load"),
        ("end_to_end_latency_p99_s", "the test serves no load"),
    ],
)
def test_the_reason_for_no_value_is_what_the_test_lacks(metric: str, reason: str) -> None:
    plain = record_of() if reason.endswith("load") else STEADILY
    (only,) = compared(plain, plain, metric).comparisons
    assert (only.verdict, only.reason) == ("no value", reason)
    asked = [Criterion(metric, gated=True, from_mark=True)]
    (marked,) = compare_reports(report_of(plain), report_of(plain), ("base", "head"), asked).comparisons
    assert (marked.verdict, marked.reason) == ("invalid", f"base has no {metric}: {reason}")


@pytest.mark.parametrize("metric", ["goodput_requests_per_s", "slo_attainment"])
def test_a_total_loss_of_goodput_fails_the_gate(metric: str) -> None:
    found = compared(slo_record(*[GOOD] * 6), slo_record(*[NONE] * 6), metric)
    (only,) = found.comparisons
    assert (only.verdict, only.head, exit_code(found)) == ("invalid", 0, 5)
    assert "head has a value of 0" in only.reason
    assert len(list_failures(found.comparisons, "warn")) == 1
    few = compared(slo_record(*[GOOD] * 6), slo_record(*[GOOD, NONE] * 3), metric)
    assert few.comparisons[0].verdict == "invalid"
