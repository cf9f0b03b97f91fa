# SPDX-License-Identifier: Apache-2.0
"""Rounds are long enough for the joules of phases that something asks for, if the budget allows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_llenergy.compare.gate import parse_fail_on, parse_gate
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.measure.phase_lengths import TRIED_LENGTH, lengthen_for_phases
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.rounds import plan_rounds
from pytest_llenergy.record.metrics import _least_length
from pytest_llenergy.record.round_statistics import RoundValue

from ..energy.waves import MS, S, domain
from .marks import ReadBefore, iteration, measured_round
from .plans import round_plan

START, ITERATION, PREFILL = 10 * S, 100 * MS, 20 * MS


def trial(series: Series, made: list[int]) -> Callable[[int], MeasuredRound]:
    """Return a function that measures a round of iterations of 100 ms, of which prefill takes 20 ms."""

    def measure(iterations: int) -> MeasuredRound:
        made.append(iterations)
        starts = [START + ITERATION * number for number in range(iterations)]
        return measured_round(*(iteration(each, each + ITERATION, each + PREFILL) for each in starts))

    return measure


def read_every(period_ns: int) -> Series:
    """Return a counter at 10 W, 30 W during prefill, read at this interval, out of step with the work."""
    series = Series("estimate", domain("cpu:processes", max_age_s=1e-5)._replace(rests=True))
    joules, last = 0.0, 9 * S
    for moment in range(9 * S, 40 * S, MS):
        at_work = moment >= START
        joules += (30.0 if at_work and (moment - START) % ITERATION < PREFILL else 10.0) / 1000
        if moment - last >= period_ns:
            last = moment
            series.add(moment, moment, joules)
    return series


def test_rounds_stay_as_they_are_if_the_phases_are_known() -> None:
    made: list[int] = []
    plan = round_plan(phases=frozenset({"prefill", "decode"}))
    found = lengthen_for_phases(
        trial(series := read_every(MS), made), 5, plan, 0.1, 10.0, [ReadBefore([series])]
    )
    assert found == (5, {})
    assert made == [5]


def test_rounds_become_longer_until_the_phase_is_known() -> None:
    """Readings every 19 ms do not resolve one prefill of 20 ms, but those of many iterations."""
    made: list[int] = []
    plan = round_plan(rounds=1, phases=frozenset({"prefill"}))
    series = read_every(19 * MS)
    iterations, unresolved = lengthen_for_phases(
        trial(series, made), 1, plan, 0.1, 100.0, [ReadBefore([series])]
    )
    assert iterations == TRIED_LENGTH
    assert unresolved == {}
    assert made == [1, TRIED_LENGTH]


def test_a_budget_that_is_too_small_is_the_reason() -> None:
    plan = round_plan(rounds=1, budget_s=0.5, phases=frozenset({"prefill"}))
    series = read_every(19 * MS)
    iterations, unresolved = lengthen_for_phases(trial(series, []), 1, plan, 0.1, 0.3, [ReadBefore([series])])
    assert iterations == 1
    assert list(unresolved) == ["prefill"]
    # What was spent, then a trial and a round of this length, each with two gaps.
    assert unresolved["prefill"] == (
        "prefill needs rounds of about 1.6 s, but the budget of 0.5 s (--energy-budget) is spent before; "
        "try 4 s"
    )


def test_a_budget_for_no_longer_rounds_is_the_reason_and_the_one_to_try_is_enough() -> None:
    plan = round_plan(rounds=1, budget_s=0.55, phases=frozenset({"prefill"}))
    hosts = [ReadBefore([series := read_every(19 * MS)])]
    _, unresolved = lengthen_for_phases(trial(series, []), 1, plan, 0.1, 0.35, hosts)
    assert unresolved["prefill"] == (
        "prefill needs rounds of about 1.6 s, but the budget of 0.55 s (--energy-budget) allows 0.1 s; "
        "try 4 s"
    )
    plan = round_plan(rounds=1, budget_s=4.0, phases=frozenset({"prefill"}))
    found = lengthen_for_phases(trial(series, []), 1, plan, 0.1, 3.8, hosts)
    assert found == (TRIED_LENGTH, {})


def test_the_uncertainty_that_rounds_share_may_fall_with_their_length_and_the_rest_with_its_root() -> None:
    """In units of what is resolvable: a third of the value."""
    assert _least_length([RoundValue(3.0, meter=4.0)]) == 16
    assert _least_length([RoundValue(3.0, meter=4.0)] * 4) == 4
    assert _least_length([RoundValue(3.0, shape=4.0)] * 4) == 4
    assert _least_length([RoundValue(3.0, meter=2.0, unsampled=3**0.5)]) == pytest.approx((4 + 28**0.5) / 2)


def settings(**changes: Any) -> Settings:
    given = {"columns": None, "fail_on": (), **changes}
    others = {"rounds": None, "warmup": None, "gap": 0.1, "target": 0.02, "budget": 4.0}
    return cast(Settings, SimpleNamespace(**given, **others))


@pytest.mark.parametrize(
    ("changes", "gate", "phases"),
    [
        ({}, None, set()),
        ({"columns": ("energy_j", "prefill_energy_j")}, None, {"prefill"}),
        ({"fail_on": (parse_fail_on("prefill_energy_per_input_token_j:3%"),)}, None, {"prefill"}),
        ({}, parse_gate("decode_energy_j", "3 J", None), {"decode"}),
        ({"columns": ("wer",)}, parse_gate("prefill_energy_j", None, "3%"), {"prefill"}),
        ({"columns": ("steady_energy_per_output_token_j",)}, None, set()),
    ],
)
def test_columns_and_gates_ask_for_phases(changes: Any, gate: Any, phases: set[str]) -> None:
    assert plan_rounds(settings(**changes), {}, gate).phases == phases
