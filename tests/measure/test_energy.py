# SPDX-License-Identifier: Apache-2.0
"""One round joined with its trace: phases, sums, and every reason for which there is no number."""

from __future__ import annotations

import math

import pytest

from pytest_llenergy.measure.energy import account
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.timeline import RankTimeline, RequestTimeline, RoundTimeline

from .waves import MS, Wave, domain, measured, seen

S = 1_000 * MS
START, BORDER, END = 10 * S, 10 * S + 400 * MS, 11 * S
WAVE = Wave(((9 * S, 50.0), (START, 500.0), (BORDER, 200.0), (END, 50.0)))
READS = range(9 * S + 5 * MS, 12 * S, MS)
LATCH = 20 * MS


def constant(name: str, watts: float, period_ns: int = MS) -> Series:
    """A counter that is read without delay every millisecond."""
    series = Series("rapl", domain(name, period_s=1e-9))
    for moment in range(9 * S, 12 * S, period_ns):
        series.add(moment, watts * moment / 1e9)
    return series


def test_phases_fill_the_round() -> None:
    result = account(measured(START, END, BORDER), [seen(WAVE, READS, LATCH)])
    prefill, decode = result.phases
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert (prefill.duration_s, decode.duration_s, result.duration_s) == (0.4, 0.6, 1.0)
    assert prefill.energy_j is not None
    assert decode.energy_j is not None
    assert result.energy_j == pytest.approx(prefill.energy_j + decode.energy_j, rel=1e-12)
    assert result.energy_j == pytest.approx(200 + 120, abs=1)
    assert prefill.energy_j == pytest.approx(200, abs=3)
    assert result.idle_power_w == pytest.approx(50, abs=1)
    assert result.start_s == 10.0
    assert result.flags == []


def test_prefill_lasts_until_the_last_rank_has_its_first_token() -> None:
    ranks = tuple(
        RankTimeline(
            rank=i, start_ns=START + i * MS, end_ns=END - i * MS, cpu_time_s=0.0, first_token_ns=first
        )
        for i, first in enumerate((BORDER, BORDER - 100 * MS))
    )
    timeline = RoundTimeline(ranks=ranks)
    assert (timeline.start_ns, timeline.first_token_ns, timeline.end_ns) == (START, BORDER, END)


def test_a_phase_shorter_than_a_tick_has_no_energy() -> None:
    border = START + 7 * MS
    result = account(measured(START, END, border), [seen(WAVE, READS, LATCH)])
    prefill, decode = result.phases
    assert prefill.energy_j is None
    assert prefill.energy_u_j is None
    assert prefill.duration_s == pytest.approx(0.007)
    assert prefill.reason == "not resolvable: 7 ms phase, 20 ms tick"
    assert decode.energy_j is not None
    assert result.energy_j == pytest.approx(320, abs=1)


@pytest.mark.parametrize("gaps", [(START - 15 * MS, END + 250 * MS), (START - 250 * MS, END + 15 * MS)])
def test_a_gap_with_too_few_ticks_gives_no_number(gaps: tuple[int, int]) -> None:
    result = account(measured(START, END, BORDER, gaps), [seen(WAVE, READS, LATCH)])
    reason = "nvml: gpu:GPU-a ticked fewer than 2 times in a quiet gap; lengthen --energy-gap"
    assert (result.energy_j, result.energy_u_j, result.energy_u_absolute_j) == (None, None, None)
    assert result.reason == reason
    assert {(phase.energy_j, phase.reason) for phase in result.phases} == {(None, reason)}
    assert [(flag.name, flag.severity, flag.detail) for flag in result.flags] == [
        ("unmeasured", "warning", reason)
    ]


def test_a_counter_that_never_moves_is_not_zero() -> None:
    series = Series("nvml", domain())
    for moment in READS:
        series.add(moment, 1234.5)
    result = account(measured(START, END), [series])
    assert result.energy_j is None
    assert result.by_domain["gpu:GPU-a"].energy_j is None
    assert result.reason is not None
    assert result.reason == result.by_domain["gpu:GPU-a"].reason


def test_a_counter_that_runs_backwards_gives_no_number() -> None:
    series = seen(WAVE, READS, LATCH)
    series.add(12 * S, 0.0)
    result = account(measured(START, END), [series])
    assert result.energy_j is None
    assert result.reason == "nvml: the counter of gpu:GPU-a went backwards"


def test_domains_are_summed_with_their_uncertainties() -> None:
    trace = [constant("cpu:package-0", 30.0), constant("dram:package-0", 12.0)]
    result = account(measured(START, END), trace)
    assert result.energy_j == pytest.approx(42)
    assert result.idle_power_w == pytest.approx(42)
    parts = [result.by_domain[name] for name in ("cpu:package-0", "dram:package-0")]
    assert [part.energy_j for part in parts] == pytest.approx([30, 12])
    assert result.energy_u_j == pytest.approx(math.hypot(*(part.energy_u_j or 0 for part in parts)))
    assert [part.low_j for part in parts] == pytest.approx([28.5, 11.4])
    assert [part.high_j for part in parts] == pytest.approx([31.5, 12.6])
    # A rectangle of full width 3 J and one of 1.2 J, each with a standard deviation of width/√12.
    own = math.hypot(3, 1.2) / math.sqrt(12)
    assert result.energy_u_absolute_j == pytest.approx(math.hypot(own, result.energy_u_j or 0))


def test_one_domain_without_a_number_leaves_no_sum() -> None:
    good, bad = constant("cpu:package-0", 30.0), constant("dram:package-0", 12.0)
    bad.fail("rapl: dram:package-0 cannot be read")
    result = account(measured(START, END, BORDER), [good, bad])
    assert result.by_domain["cpu:package-0"].energy_j == pytest.approx(30)
    assert result.energy_j is None
    assert result.reason == "rapl: dram:package-0 cannot be read"
    assert [phase.energy_j for phase in result.phases] == [None, None]


def test_without_a_meter_the_reasons_are_told() -> None:
    result = account(measured(START, END, BORDER), [], ["nvml: no driver", "rapl: no counter"])
    assert result.energy_j is None
    assert result.reason == "nvml: no driver; rapl: no counter"
    assert result.duration_s == 1.0
    assert result.by_domain == {}


def test_idle_power_that_moved_is_uncertain() -> None:
    warm = Wave(((9 * S, 50.0), (START, 500.0), (END, 80.0)))
    result = account(measured(START, END), [seen(warm, READS, LATCH)])
    assert result.idle_power_w == pytest.approx(65, abs=1)
    assert result.idle_power_u_w == pytest.approx(30 / math.sqrt(12), rel=0.1)


def test_tokens_are_counted_as_produced() -> None:
    requests = tuple(RequestTimeline(input_tokens=i, output_tokens=o) for i, o in ((3, 16), (9, 2), (5, 1)))
    rank = RankTimeline(rank=0, start_ns=START, end_ns=END, cpu_time_s=0.0, requests=requests)
    round_ = measured(START, END)
    round_ = type(round_)(**{**vars(round_), "timeline": RoundTimeline(ranks=(rank,))})
    result = account(round_, [constant("cpu:package-0", 30.0)])
    assert result.tokens is not None
    assert (result.tokens.input, result.tokens.output, result.requests) == (17, 19, 3)
