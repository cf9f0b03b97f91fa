# SPDX-License-Identifier: Apache-2.0
"""Metrics of a test, compared with values computed by hand."""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist, fmean
from typing import Any

import msgspec
import pytest

from pytest_llenergy.record import round_statistics
from pytest_llenergy.record.metrics import compute_metrics, is_prefill_only
from pytest_llenergy.record.record import Flag, Metric, Phase, Round, Terms, Tokens


def round_of(energy_j: float | None, u_j: float = 0.0, own_j: float = 0.0, duration_s: float = 2.0) -> Round:
    return Round(
        start_s=0.0,
        duration_s=duration_s,
        energy_j=energy_j,
        energy_u_j=u_j if energy_j is not None else None,
        energy_u_absolute_j=math.hypot(u_j, own_j) if energy_j is not None else None,
        idle_power_w=3.0,
        idle_power_u_w=0.1,
        by_domain={},
        tokens=Tokens(input=30, output=4),
        requests=2,
        time_to_first_token_s=0.25,
        inter_token_latency_s=0.5,
        phases=[
            Phase(name="prefill", duration_s=0.5, energy_j=2.0, energy_u_j=0.2),
            Phase(name="decode", duration_s=1.5, energy_j=None, energy_u_j=None, reason="not resolvable: x"),
        ],
        reason=None if energy_j is not None else "the counter stood still",
        flags=[] if energy_j is not None else [Flag(name="unmeasured", severity="warning", detail="x")],
    )


ROUNDS = [round_of(10.0, 0.3, 1.0), round_of(12.0, 0.4, 1.2), round_of(14.0, 0.5, 1.4)]

#: Least and largest of three values enclose the median with a probability of 3/4; half of 95.45 % is wider.
SCATTER = (14 - 10) / 2 / NormalDist().inv_cdf(1 - 1 / 8) * 1.62


def figure(metric: Metric) -> tuple[float | None, float | None, float | None]:
    return metric.value, metric.uncertainty, metric.uncertainty_absolute


def test_the_median_has_a_relative_and_an_absolute_uncertainty() -> None:
    metric = compute_metrics(ROUNDS, None)["energy_j"]
    # The meter's uncertainty, 0.4 J over √3, is already part of the scatter.
    assert figure(metric) == pytest.approx((12, SCATTER, math.hypot(SCATTER, 1.2)))
    assert (metric.n, metric.unit, metric.reason) == (3, "J", None)
    assert metric.spread == pytest.approx(SCATTER)


def test_the_uncertainty_is_never_below_that_of_the_meter() -> None:
    metric = compute_metrics([round_of(10.0, 0.3)] * 4, None)["energy_j"]
    assert metric.spread == 0
    assert metric.uncertainty == pytest.approx(0.3 / math.sqrt(4) * math.sqrt(math.pi / 2))


def test_an_outlying_round_does_not_raise_the_absolute_uncertainty() -> None:
    usual, slow = round_of(10.0, 0.0, 1.0), round_of(100.0, 0.0, 10.0)
    metric = compute_metrics([usual] * 7 + [slow], None)["energy_j"]
    assert figure(metric) == pytest.approx((10, 0, 1))


def test_metrics_apply_to_one_iteration() -> None:
    many = [msgspec.structs.replace(each, iterations=5) for each in ROUNDS]
    one, five = compute_metrics(ROUNDS, None), compute_metrics(many, None)
    for name in ("energy_j", "net_energy_j", "duration_s", "prefill_energy_j"):
        assert five[name].value == pytest.approx((one[name].value or 0) / 5), name
        assert five[name].uncertainty == pytest.approx((one[name].uncertainty or 0) / 5), name
    # Figures per token or request, and power, do not depend on the number of iterations.
    for name in ("energy_per_output_token_j", "energy_per_request_j", "mean_power_w", "output_tokens_per_s"):
        assert figure(five[name]) == pytest.approx(figure(one[name])), name


def energy_of_dithered_rounds(energies: list[float], phases: list[float], unseen_j: float) -> Metric:
    terms = Terms(edges_j=0.0, outside_j=0.0, resolution_j=0.0, coverage_j=unseen_j)
    rounds = [
        msgspec.structs.replace(round_of(energy, unseen_j), terms=terms, phase=phase)
        for energy, phase in zip(energies, phases, strict=True)
    ]
    return compute_metrics(rounds, None, coverage=0.25)["energy_j"]


#: Readings of a part-time sensor, which depend smoothly on the phase alone.
PHASES = [0.06, 0.19, 0.31, 0.44, 0.56, 0.69, 0.81, 0.94]
BY_PHASE = [10 + 5 * math.sin(2 * math.pi * phase) for phase in PHASES]


def test_phases_spread_over_a_tick_average_out_the_blind_time_of_a_sensor() -> None:
    metric = energy_of_dithered_rounds(BY_PHASE, PHASES, 8.0)
    assert metric.value == pytest.approx(10, abs=0.1)
    assert metric.uncertainty is not None
    # Neighbours differ by at most 3.8 J; the plain scatter would give 1.34 J, and the sensor 8 J.
    assert metric.uncertainty < 1.0


def test_rounds_in_one_part_of_a_tick_keep_the_full_uncertainty_of_the_sensor() -> None:
    metric = energy_of_dithered_rounds([9.0, 9.1] * 4, [phase / 5 for phase in PHASES], 8.0)
    assert metric.uncertainty == pytest.approx(8.0, rel=0.01)


def test_a_median_below_zero_is_not_resolvable() -> None:
    metric = compute_metrics([round_of(-0.2, 0.3), round_of(0.1, 0.3)], None)["energy_j"]
    assert (metric.value, metric.reason) == (None, "not resolvable: the median of 2 rounds is -0.05 J")


@pytest.mark.parametrize(
    ("name", "factor", "unit"),
    [
        ("energy_per_output_token_j", 1 / 4, "J/token"),
        ("energy_per_request_j", 1 / 2, "J/request"),
        ("mean_power_w", 1 / 2, "W"),
    ],
)
def test_scaled_metrics_scale_their_uncertainties(name: str, factor: float, unit: str) -> None:
    metrics = compute_metrics(ROUNDS, None)
    scaled = [None if part is None else part * factor for part in figure(metrics["energy_j"])]
    assert figure(metrics[name]) == pytest.approx(tuple(scaled))
    assert metrics[name].unit == unit


def test_net_energy_subtracts_idle_power_with_its_uncertainty() -> None:
    metric = compute_metrics([ROUNDS[0], ROUNDS[0]], None)["net_energy_j"]
    meter = math.hypot(0.3, 0.2) / math.sqrt(2)
    assert figure(metric) == pytest.approx((4, meter, math.hypot(meter, 1.0 * 4 / 10)))


def test_metrics_of_time_have_only_scatter() -> None:
    metrics = compute_metrics([round_of(10, 1, 1, duration_s=2.0), round_of(10, 1, 1, duration_s=4.0)], 4096)
    # Two values have one degree of freedom.
    assert figure(metrics["duration_s"]) == pytest.approx((3, 6.985, 6.985))
    # Four tokens in the median time of 3 s, not the mean of 2 and 1 token/s.
    assert figure(metrics["output_tokens_per_s"]) == pytest.approx((4 / 3, 6.985 / 2, 6.985 / 2))
    assert figure(metrics["time_to_first_token_s"]) == (0.25, 0, 0)
    assert figure(metrics["inter_token_latency_s"]) == (0.5, 0, 0)
    assert (metrics["peak_memory_bytes"].value, metrics["peak_memory_bytes"].unit) == (4096, "B")


def test_a_phase_has_the_relative_accuracy_of_its_round() -> None:
    metrics = compute_metrics([ROUNDS[0], ROUNDS[0]], None)
    meter = 0.2 / math.sqrt(2)
    assert figure(metrics["prefill_energy_j"]) == pytest.approx((2, meter, math.hypot(meter, 1.0 * 2 / 10)))
    assert (metrics["decode_energy_j"].value, metrics["decode_energy_j"].reason) == (
        None,
        "2 of 2 rounds: not resolvable: x",
    )


def test_a_single_round_has_no_uncertainty() -> None:
    metrics = compute_metrics([ROUNDS[1]], None)
    assert figure(metrics["energy_j"]) == (12, None, None)
    assert metrics["duration_s"].reason == "one round shows no scatter: uncertainty unknown"


def test_a_phase_resolved_in_only_some_rounds_has_no_value() -> None:
    """Only the longest phases would be resolved, which would bias the value."""
    unresolved = msgspec.structs.replace(
        ROUNDS[0],
        phases=[
            Phase(
                name="prefill", duration_s=0.01, energy_j=None, energy_u_j=None, reason="not resolvable: y"
            ),
            ROUNDS[0].phases[1],
        ],
    )
    metric = compute_metrics([unresolved, *ROUNDS], None)["prefill_energy_j"]
    assert (metric.value, metric.reason) == (None, "1 of 4 rounds: not resolvable: y")


def test_a_phase_that_some_rounds_do_not_have_has_no_value() -> None:
    without = msgspec.structs.replace(ROUNDS[0], phases=[])
    metric = compute_metrics([without, without, ROUNDS[1]], None)["prefill_energy_j"]
    assert (metric.value, metric.reason) == (None, "2 of 3 rounds: the workload has no phases")


def test_invalid_rounds_are_left_out() -> None:
    impossible = msgspec.structs.replace(
        round_of(1e9, 0.1), flags=[Flag(name="doubtful", severity="invalid", detail="x")]
    )
    warned = msgspec.structs.replace(
        ROUNDS[2], flags=[Flag(name="contended", severity="warning", detail="x")]
    )
    assert compute_metrics([ROUNDS[0], impossible, ROUNDS[1], warned], None) == compute_metrics(ROUNDS, None)
    assert compute_metrics([impossible], None)["duration_s"].value is None


TIMES = {"duration_s", "output_tokens_per_s", "time_to_first_token_s", "inter_token_latency_s"}


def test_a_round_without_energy_counts_only_for_times() -> None:
    metrics = compute_metrics([*ROUNDS, round_of(None)], None)
    for name, metric in metrics.items():
        if metric.value is not None and metric.unit != "B":
            assert metric.n == (4 if name in TIMES else 3), name


def test_every_metric_without_a_value_has_a_reason() -> None:
    # Phases have energy only if their round does.
    silent = msgspec.structs.replace(round_of(None), phases=[])
    metrics = compute_metrics([silent, silent], None)
    assert {name for name, metric in metrics.items() if metric.value is not None} == TIMES
    without = {name: metric for name, metric in metrics.items() if name not in TIMES}
    assert {metric.n for metric in without.values()} == {0}
    assert without.pop("peak_memory_bytes").reason == "this system does not report the peak"
    assert {metric.reason for metric in without.values()} == {"the counter stood still"}


def test_a_workload_without_tokens_gives_the_reason_for_each_metric() -> None:
    bare = msgspec.structs.replace(
        ROUNDS[0],
        tokens=None,
        requests=None,
        phases=[],
        time_to_first_token_s=None,
        inter_token_latency_s=None,
    )
    metrics = compute_metrics([bare], None)
    assert {name: metric.reason for name, metric in metrics.items() if metric.value is None} == {
        "energy_per_output_token_j": "no output tokens (count yours: energy(fn, output_tokens=...))",
        "energy_per_input_token_j": "the workload has no input tokens",
        "energy_per_token_j": "the workload has no input tokens",
        "energy_per_request_j": "the workload has no requests",
        "output_tokens_per_s": "no output tokens (count yours: energy(fn, output_tokens=...))",
        "time_to_first_token_s": "no token timestamps",
        "inter_token_latency_s": "no token timestamps, or fewer than two tokens",
        "prefill_energy_j": "the workload has no phases",
        "decode_energy_j": "the workload has no phases",
        "prefill_energy_per_input_token_j": "the workload has no phases",
        "decode_energy_per_output_token_j": "the workload has no phases",
        "peak_memory_bytes": "this system does not report the peak",
    }


@pytest.mark.parametrize(("degrees", "t"), [(1, 13.97), (2.9, 4.53), (9, 2.32), (10, 2.28), (30, 2.087)])
def test_twice_the_uncertainty_is_students_t(degrees: float, t: float) -> None:
    """Compared with 95.45 % of GUM table G.2; fractions count as the next lower degree."""
    assert 2 * round_statistics.half_student(degrees) == pytest.approx(t, abs=2e-3)


def test_the_median_of_two_values_has_the_uncertainty_of_their_mean() -> None:
    assert round_statistics.uncertainty_of_median([1.0, 3.0]) == pytest.approx(6.985)


def test_added_rounds_widen_the_uncertainty_but_not_the_spread() -> None:
    rounds = [round_of(10.0 + each % 3) for each in range(8)]
    given, added = (compute_metrics(rounds, None, planned=planned)["energy_j"] for planned in (8, 6))
    assert (added.value, added.spread) == (given.value, given.spread)
    assert given.uncertainty == given.spread
    assert added.uncertainty == pytest.approx(1.45 * (given.spread or 0))


def test_invalid_rounds_are_not_among_those_that_others_were_added_to() -> None:
    spoiled = msgspec.structs.replace(ROUNDS[0], flags=[Flag(name="foreign", severity="invalid", detail="x")])
    rounds = [*ROUNDS[:2], *[spoiled] * 4, ROUNDS[2]]
    given, added = (compute_metrics(rounds, None, planned=planned)["energy_j"] for planned in (None, 6))
    assert added.uncertainty == pytest.approx(2.6 * (given.uncertainty or 0))


def test_one_outlier_in_six_rounds_moves_neither_the_value_nor_its_uncertainty() -> None:
    usual = [10.0, 10.1, 10.2, 10.3, 10.4]
    both = [
        compute_metrics([round_of(each) for each in [*usual, last]], None)["energy_j"]
        for last in (10.5, 900.0)
    ]
    assert both[0] == both[1]


def test_a_rate_is_the_count_over_the_time_of_the_middle_rounds() -> None:
    assert round_statistics.middle_rate([1.0, 2.0, 50.0]) == 2.0
    assert round_statistics.middle_rate([1.0, 2.0, 4.0, 50.0]) == pytest.approx(1 / fmean([1 / 2, 1 / 4]))


@pytest.mark.parametrize("n", [8, 16, 32])
def test_dithering_beats_random_phases_and_its_uncertainty_is_correct(n: int) -> None:
    """A load of 20 ms under a sensor that samples 25 ms of every 100 ms."""

    def sampled(phase: float) -> float:
        start = (phase * 100) % 100
        overlap = max(0.0, min(start + 20, 100) - max(start, 75)) + max(0.0, min(start + 20 - 100, 25) - 25)
        return overlap * 4

    rng = Random(n)
    errors, claims = [], []
    for _ in range(500):
        phases = [(index + rng.random()) / n for index in range(n)]
        values = [sampled(phase) for phase in phases]
        errors.append(abs(fmean(values) - 20))
        claims.append(round_statistics.uncertainty_of_dithered_mean(values, phases))
    assert fmean(error <= 2 * claim for error, claim in zip(errors, claims, strict=True)) >= 0.95
    by_chance = math.sqrt(fmean((sampled(rng.random()) - 20) ** 2 for _ in range(2000)) / n)
    assert math.sqrt(fmean(error**2 for error in errors)) < by_chance / 2


def test_dithered_values_without_a_trend_have_the_usual_uncertainty() -> None:
    rng = Random(1)
    phases = [index / 16 for index in range(16)]
    drawn = [[rng.gauss(10, 1) for _ in phases] for _ in range(500)]
    claimed = fmean(round_statistics.uncertainty_of_dithered_mean(values, phases) for values in drawn)
    assert claimed == pytest.approx(round_statistics.half_student(10) / math.sqrt(16), rel=0.1)


@pytest.mark.parametrize(
    ("phases", "covers"),
    [
        ([0.1, 0.3, 0.6, 0.9], True),
        ([0.1, 0.2, 0.3, 0.35], False),
        ([0.05, 0.4, 0.6, 0.9], False),
        ([0.1, 0.3, 0.6, None], False),
        ([], False),
    ],
)
def test_phases_with_a_hole_do_not_cover_a_tick(phases: list[float | None], covers: bool) -> None:
    assert round_statistics.phases_cover_tick(phases, 0.35) is covers


def test_drift_is_the_change_along_the_fitted_line() -> None:
    found = round_statistics.linear_drift([10.0, 10.2, 10.4, 10.6, 10.8])
    assert found is not None
    assert found[0] == pytest.approx(0.8 / 10.4)
    assert found[1] > 1000
    assert round_statistics.linear_drift([1.0, 2.0, 3.0]) is None
    assert round_statistics.linear_drift([5.0] * 5) == (0.0, 0.0)


def test_random_scatter_is_rarely_called_drift() -> None:
    rng = Random(3)
    found = [round_statistics.linear_drift([rng.gauss(10, 1) for _ in range(6)]) for _ in range(2000)]
    assert fmean(abs(each[1]) >= 4 for each in found if each) < 0.03


def served_round(output: int, requests: int = 2, **changes: Any) -> Round:
    phases = [
        Phase(name="prefill", duration_s=0.5, energy_j=2.0, energy_u_j=0.2),
        Phase(name="decode", duration_s=1.5, energy_j=6.0, energy_u_j=0.3),
    ]
    made = msgspec.structs.replace(
        round_of(8.0, 0.4, 0.8), tokens=Tokens(input=40, output=output), requests=requests, phases=phases
    )
    return msgspec.structs.replace(made, **changes)


def test_joules_are_given_for_each_kind_of_token() -> None:
    """Two sequences of 11 tokens: prefill makes the first of each, decode the other 20."""
    rounds = [served_round(22)] * 3
    metrics = compute_metrics(rounds, None)
    expected = {
        "energy_per_input_token_j": 8 / 40,
        "energy_per_output_token_j": 8 / 22,
        "energy_per_token_j": 8 / 62,
        "prefill_energy_per_input_token_j": 2 / 40,
        "decode_energy_per_output_token_j": 6 / 20,
    }
    assert {name: metrics[name].value for name in expected} == pytest.approx(expected)
    assert {metrics[name].unit for name in expected} == {"J/token"}
    for name, value in expected.items():
        phase = name.partition("_")[0]
        u = {"prefill": 0.1, "decode": 0.05}.get(phase, 0.05) / math.sqrt(3) * math.sqrt(math.pi / 2)
        assert metrics[name].uncertainty == pytest.approx(u * value), name
        assert metrics[name].uncertainty_absolute == pytest.approx(math.hypot(u, 0.1) * value), name


def test_the_metrics_of_tokens_do_not_depend_on_the_number_of_iterations() -> None:
    names = (
        "energy_per_input_token_j",
        "prefill_energy_per_input_token_j",
        "decode_energy_per_output_token_j",
    )
    once = compute_metrics([served_round(22)] * 3, None)
    thrice = served_round(
        66,
        requests=6,
        iterations=3,
        tokens=Tokens(input=120, output=66),
        duration_s=6.0,
        energy_j=24.0,
        phases=[
            Phase(
                name=each.name,
                duration_s=3 * each.duration_s,
                energy_j=3 * (each.energy_j or 0),
                energy_u_j=0.1,
            )
            for each in served_round(22).phases
        ],
    )
    often = compute_metrics([thrice] * 3, None)
    assert [often[name].value for name in names] == pytest.approx([once[name].value for name in names])


def test_one_token_for_each_request_leaves_nothing_for_decode() -> None:
    metrics = compute_metrics([served_round(2)] * 3, None)
    assert metrics["decode_energy_per_output_token_j"].value is None
    reason = "3 of 3 rounds: no sequence has a second output token"
    assert metrics["decode_energy_per_output_token_j"].reason == reason
    assert metrics["prefill_energy_per_input_token_j"].value == pytest.approx(0.05)
    assert is_prefill_only([served_round(2)])
    assert is_prefill_only([served_round(0)])
    assert not is_prefill_only([served_round(3)])
    assert not is_prefill_only([])


def with_prefill(energy_j: float, **terms: float) -> Round:
    u_j = math.hypot(*terms.values())
    split = Terms(**{**dict.fromkeys(("edges_j", "outside_j", "resolution_j", "coverage_j"), 0.0), **terms})
    phase = Phase(name="prefill", duration_s=0.01, energy_j=energy_j, energy_u_j=u_j, terms=split)
    return msgspec.structs.replace(ROUNDS[0], phases=[phase])


def test_a_phase_is_resolved_by_all_rounds_together() -> None:
    """Each of six rounds knows 1 J to 0.5 J, all know it to 0.2 J; what they share does not shrink."""
    scattered = [with_prefill(1 + 0.1 * (-1) ** index, edges_j=0.5) for index in range(6)]
    metric = compute_metrics(scattered, None)["prefill_energy_j"]
    assert metric.value == pytest.approx(1.0)
    assert metric.uncertainty == pytest.approx(0.5 / math.sqrt(6) * math.sqrt(math.pi / 2), rel=0.01)
    assert compute_metrics(scattered[:1], None)["prefill_energy_j"].value is None
    shared = compute_metrics([with_prefill(1.0, shape_j=0.5)] * 6, None)["prefill_energy_j"]
    assert shared.value is None
    assert (shared.reason or "").startswith("not resolvable: 10 ms phase in 6 rounds of 1 iter")
