# SPDX-License-Identifier: Apache-2.0
"""Figures of a test against values worked out by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from pytest_llenergy.measure.metrics import summarise
from pytest_llenergy.model.record import Flag, Metric, Phase, Round, Tokens


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
SCATTER = 2 / math.sqrt(3)


def figure(metric: Metric) -> tuple[float | None, float | None, float | None]:
    return metric.value, metric.uncertainty, metric.uncertainty_absolute


def test_the_mean_of_rounds_with_both_uncertainties() -> None:
    metrics = summarise(ROUNDS, None)
    absolute = math.hypot(SCATTER, 0.4, 1.2)
    assert figure(metrics["energy_j"]) == pytest.approx((12, math.hypot(SCATTER, 0.4), absolute))
    assert (metrics["energy_j"].n, metrics["energy_j"].unit, metrics["energy_j"].reason) == (3, "J", None)


@pytest.mark.parametrize(
    ("name", "factor", "unit"),
    [
        ("energy_per_output_token_j", 1 / 4, "J/token"),
        ("energy_per_request_j", 1 / 2, "J/request"),
        ("mean_power_w", 1 / 2, "W"),
    ],
)
def test_scaled_figures(name: str, factor: float, unit: str) -> None:
    metrics = summarise(ROUNDS, None)
    scaled = [None if part is None else part * factor for part in figure(metrics["energy_j"])]
    assert figure(metrics[name]) == pytest.approx(tuple(scaled))
    assert metrics[name].unit == unit


def test_net_energy_takes_off_the_idle_power_with_its_own_uncertainty() -> None:
    metric = summarise([ROUNDS[0], ROUNDS[0]], None)["net_energy_j"]
    assert figure(metric) == pytest.approx((10 - 3 * 2, math.hypot(0.3, 0.2), math.hypot(0.3, 1.0, 0.2)))


def test_figures_of_time_scatter_only() -> None:
    metrics = summarise([round_of(10, 1, 1, duration_s=2.0), round_of(10, 1, 1, duration_s=4.0)], 4096)
    assert figure(metrics["duration_s"]) == pytest.approx((3, 1, 1))
    assert figure(metrics["output_tokens_per_s"]) == pytest.approx((1.5, 0.5, 0.5))
    assert figure(metrics["time_to_first_token_s"]) == (0.25, 0, 0)
    assert figure(metrics["inter_token_latency_s"]) == (0.5, 0, 0)
    assert (metrics["peak_memory_bytes"].value, metrics["peak_memory_bytes"].unit) == (4096, "B")


def test_a_phase_shares_the_accuracy_of_its_round() -> None:
    metrics = summarise([ROUNDS[0], ROUNDS[0]], None)
    assert figure(metrics["prefill_energy_j"]) == pytest.approx((2, 0.2, math.hypot(0.2, 1.0 * 2 / 10)))
    assert (metrics["decode_energy_j"].value, metrics["decode_energy_j"].reason) == (
        None,
        "2 of 2 rounds: not resolvable: x",
    )


def test_one_round_shows_no_scatter_and_claims_no_uncertainty() -> None:
    metrics = summarise([ROUNDS[1]], None)
    assert figure(metrics["energy_j"]) == (12, None, None)
    assert metrics["duration_s"].reason == "one round shows no scatter: uncertainty unknown"


def test_a_phase_that_was_resolved_in_some_rounds_only_has_no_mean() -> None:
    """Those would be the longest ones."""
    unresolved = msgspec.structs.replace(
        ROUNDS[0],
        phases=[
            Phase(
                name="prefill", duration_s=0.01, energy_j=None, energy_u_j=None, reason="not resolvable: y"
            ),
            ROUNDS[0].phases[1],
        ],
    )
    metric = summarise([unresolved, *ROUNDS], None)["prefill_energy_j"]
    assert (metric.value, metric.reason) == (None, "1 of 4 rounds: not resolvable: y")


def test_invalid_rounds_are_left_out() -> None:
    impossible = msgspec.structs.replace(
        round_of(1e9, 0.1), flags=[Flag(name="impossible", severity="invalid", detail="x")]
    )
    warned = msgspec.structs.replace(
        ROUNDS[2], flags=[Flag(name="contended", severity="warning", detail="x")]
    )
    assert summarise([ROUNDS[0], impossible, ROUNDS[1], warned], None) == summarise(ROUNDS, None)
    assert summarise([impossible], None)["duration_s"].value is None


TIMES = {"duration_s", "output_tokens_per_s", "time_to_first_token_s", "inter_token_latency_s"}


def test_a_round_without_joules_counts_for_its_times_only() -> None:
    metrics = summarise([*ROUNDS, round_of(None)], None)
    for name, metric in metrics.items():
        if metric.value is not None and metric.unit != "B":
            assert metric.n == (4 if name in TIMES else 3), name


def test_every_figure_without_a_value_has_a_reason() -> None:
    # Phases have joules only where their round has.
    silent = msgspec.structs.replace(round_of(None), phases=[])
    metrics = summarise([silent, silent], None)
    assert {name for name, metric in metrics.items() if metric.value is not None} == TIMES
    without = {name: metric for name, metric in metrics.items() if name not in TIMES}
    assert {metric.n for metric in without.values()} == {0}
    assert without.pop("peak_memory_bytes").reason == "this system does not tell the peak"
    assert {metric.reason for metric in without.values()} == {"the counter stood still"}


def test_a_workload_without_tokens_says_so() -> None:
    bare = msgspec.structs.replace(
        ROUNDS[0],
        tokens=None,
        requests=None,
        phases=[],
        time_to_first_token_s=None,
        inter_token_latency_s=None,
    )
    metrics = summarise([bare], None)
    assert {name: metric.reason for name, metric in metrics.items() if metric.value is None} == {
        "energy_per_output_token_j": "the workload counts no tokens",
        "energy_per_request_j": "the workload has no requests",
        "output_tokens_per_s": "the workload counts no tokens",
        "time_to_first_token_s": "no token timestamps",
        "inter_token_latency_s": "fewer than two tokens",
        "prefill_energy_j": "the workload has no phases",
        "decode_energy_j": "the workload has no phases",
        "peak_memory_bytes": "this system does not tell the peak",
    }
