# SPDX-License-Identifier: Apache-2.0
"""Accounting of one round: phases, sums, and the reason whenever there is no energy."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import pytest

from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window_arithmetic import energy_between
from pytest_llenergy.measure.accounting import inter_token_latency_s, time_to_first_token_s
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.timeline import Iteration, RankTimeline, RequestTimeline, Timeline

from ..energy.waves import MS, S, Sensor, Wave, domain, read_at
from .marks import account_here, iteration, measured_round, rank_of

START, BORDER, END = 10 * S, 10 * S + 400 * MS, 11 * S
WAVE = Wave(((9 * S, 50.0), (START, 500.0), (BORDER, 200.0), (END, 50.0)))
ROUND = iteration(START, END, BORDER)
READS = range(9 * S + 5 * MS, 12 * S, MS)
LATCH = 20 * MS


def constant(name: str, watts: float, period_ns: int = MS) -> Series:
    """Return the series of a continuous counter at constant power, read every ``period_ns``."""
    series = Series("rapl", domain(name, max_age_s=1e-9))
    for moment in range(9 * S, 12 * S, period_ns):
        series.add(moment, moment, watts * moment / 1e9)
    return series


def test_phase_energies_add_up_to_that_of_the_round() -> None:
    result = account_here(measured_round(ROUND), [read_at(Sensor(WAVE, LATCH), READS)])
    prefill, decode = result.phases
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert (prefill.duration_s, decode.duration_s, result.duration_s) == (0.4, 0.6, 1.0)
    assert prefill.energy_j is not None
    assert decode.energy_j is not None
    assert result.energy_j == pytest.approx(prefill.energy_j + decode.energy_j, rel=1e-9)
    assert result.energy_j == pytest.approx(200 + 120, abs=1)
    assert prefill.energy_j == pytest.approx(200, abs=3)
    assert result.idle_power_w == pytest.approx(50, abs=1)
    assert result.start_s == 10.0
    assert result.flags == []


def test_prefill_lasts_until_the_first_token_of_the_last_rank() -> None:
    firsts = enumerate((BORDER, BORDER - 100 * MS))
    ranks = tuple(rank_of(iteration(START + i * MS, END - i * MS, first), rank=i) for i, first in firsts)
    timeline = Timeline(ranks=ranks)
    assert (timeline.start_ns, timeline.borders_ns, timeline.end_ns) == (START, ((START, BORDER),), END)


def test_ranks_whose_iterations_overlap_have_no_phases() -> None:
    slow = rank_of(
        iteration(START, START + 300 * MS, START + 200 * MS), iteration(START + 300 * MS, END, END)
    )
    fast = rank_of(
        iteration(START, START + 100 * MS, START + 50 * MS), iteration(START + 100 * MS, END, END - MS)
    )
    assert Timeline(ranks=(slow, fast)).borders_ns == ()
    assert len(Timeline(ranks=(slow, slow)).borders_ns) == 2


def test_the_phases_of_several_iterations_are_summed() -> None:
    """Four iterations of 250 ms: 100 ms at 500 W, then 150 ms at 200 W."""
    starts = [START + i * 250 * MS for i in range(4)]
    steps = [step for start in starts for step in ((start, 500.0), (start + 100 * MS, 200.0))]
    wave = Wave(((9 * S, 50.0), *steps, (END, 50.0)))
    parts = [iteration(start, start + 250 * MS, start + 100 * MS) for start in starts]
    result = account_here(measured_round(*parts), [read_at(Sensor(wave, LATCH), READS)])
    prefill, decode = result.phases
    assert result.iterations == 4
    assert (prefill.duration_s, decode.duration_s) == pytest.approx((0.4, 0.6))
    assert result.energy_j == pytest.approx(200 + 120, abs=1)
    for phase, true_j in ((prefill, 200), (decode, 120)):
        assert phase.energy_j is not None
        assert phase.energy_u_j is not None
        assert abs(phase.energy_j - true_j) <= 2 * phase.energy_u_j
        assert phase.energy_u_j < 0.1 * true_j


def test_a_phase_too_short_to_resolve_has_its_uncertainty_and_no_metric() -> None:
    border = START + 2 * MS
    result = account_here(
        measured_round(iteration(START, END, border)), [read_at(Sensor(WAVE, LATCH), READS)]
    )
    prefill, decode = result.phases
    assert prefill.energy_j is not None
    assert prefill.energy_u_j is not None
    assert prefill.energy_u_j > prefill.energy_j / 3
    assert prefill.duration_s == pytest.approx(0.002)
    assert decode.energy_j is not None
    assert result.energy_j == pytest.approx(320, abs=1)
    metrics = compute_metrics([result, result], None)
    assert metrics["decode_energy_j"].value == pytest.approx(decode.energy_j)
    reason = metrics["prefill_energy_j"].reason or ""
    assert reason.startswith("not resolvable: 2 ms phase in 2 rounds of 1 iteration; the mark")
    # So many iterations do resolve it.
    (named,) = re.findall(r"iterations=(\d+)", reason)
    starts = [START + i * 57 * MS for i in range(int(named))]
    steps = [step for start in starts for step in ((start, 500.0), (start + 2 * MS, 200.0))]
    end_ns = starts[-1] + 57 * MS
    series = read_at(
        Sensor(Wave(((9 * S, 50.0), *steps, (end_ns, 50.0))), LATCH), range(9 * S, end_ns + S, MS)
    )
    longer = measured_round(*(iteration(start, start + 57 * MS, start + 2 * MS) for start in starts))
    value = compute_metrics([account_here(longer, [series])] * 2, None)["prefill_energy_j"]
    assert value.value == pytest.approx(1.0, abs=2 * (value.uncertainty or 0.0)), value


def test_a_phase_below_a_twentieth_of_a_tick_has_no_energy_however_often_it_is_repeated() -> None:
    short_ns, starts = round(0.9 * MS), [START + i * 50 * MS for i in range(20)]
    steps = [step for start in starts for step in ((start, 500.0), (start + short_ns, 200.0))]
    wave = Wave(((9 * S, 50.0), *steps, (END, 50.0)))
    parts = [iteration(start, start + 50 * MS, start + short_ns) for start in starts]
    prefill, decode = account_here(measured_round(*parts), [read_at(Sensor(wave, LATCH), READS)]).phases
    assert prefill.energy_j is None
    assert (prefill.reason or "").startswith("not resolvable: 0.9 ms phase, 20 ms tick, in which no number")
    assert (prefill.reason or "").endswith("below 1 ms")
    assert decode.energy_j == pytest.approx(20 * 0.0491 * 200, rel=0.05)


@pytest.mark.parametrize("gaps", [(START - 15 * MS, END + 250 * MS), (START - 250 * MS, END + 15 * MS)])
def test_a_gap_with_too_few_ticks_gives_a_reason_instead_of_energy(gaps: tuple[int, int]) -> None:
    result = account_here(measured_round(ROUND, gaps=gaps), [read_at(Sensor(WAVE, LATCH), READS)])
    reason = "nvml: gpu:GPU-a ticked fewer than 2 times in a quiet gap; it stands still"
    assert (result.energy_j, result.energy_u_j, result.energy_u_absolute_j) == (None, None, None)
    assert result.reason == reason
    assert {(phase.energy_j, phase.reason) for phase in result.phases} == {(None, reason)}
    assert [(flag.name, flag.severity, flag.detail) for flag in result.flags] == [
        ("unmeasured", "warning", reason)
    ]


def test_a_counter_that_never_moves_gives_a_reason_instead_of_zero() -> None:
    series = Series("nvml", domain())
    for moment in READS:
        series.add(moment, moment, 1234.5)
    result = account_here(measured_round(iteration(START, END)), [series])
    assert result.energy_j is None
    assert result.by_domain["gpu:GPU-a"].energy_j is None
    assert result.reason is not None
    assert result.reason == result.by_domain["gpu:GPU-a"].reason


def test_a_counter_that_runs_backwards_gives_a_reason_instead_of_energy() -> None:
    series = read_at(Sensor(WAVE, LATCH), READS)
    series = read_at(Sensor(WAVE, LATCH), range(9 * S, START + 300 * MS, MS))
    series.add(START + 310 * MS, START + 310 * MS, 7.0)
    for moment in range(START + 320 * MS, 12 * S, MS):
        series.add(moment, moment, Sensor(WAVE, LATCH).counter_j(moment) - 100)
    result = account_here(measured_round(iteration(START, END)), [series])
    assert result.energy_j is None
    assert (result.reason or "").startswith("nvml: the counter of gpu:GPU-a went backwards, from ")


def test_domains_are_summed_with_their_uncertainties() -> None:
    trace = [constant("cpu:package-0", 30.0), constant("dram:package-0", 12.0)]
    result = account_here(measured_round(iteration(START, END)), trace)
    assert result.energy_j == pytest.approx(42)
    assert result.idle_power_w == pytest.approx(42)
    parts = [result.by_domain[name] for name in ("cpu:package-0", "dram:package-0")]
    assert [part.energy_j for part in parts] == pytest.approx([30, 12])
    assert result.energy_u_j == pytest.approx(math.hypot(*(part.energy_u_j or 0 for part in parts)))
    assert [part.low_j for part in parts] == pytest.approx([28.5, 11.4])
    assert [part.high_j for part in parts] == pytest.approx([31.5, 12.6])
    # Rectangular distributions of full width 3 J and 1.2 J, fully correlated: standard deviation width/√12.
    own = (3 + 1.2) / math.sqrt(12)
    assert result.energy_u_absolute_j == pytest.approx(math.hypot(own, result.energy_u_j or 0))


def test_one_domain_without_energy_leaves_the_sum_without_energy() -> None:
    good, bad = constant("cpu:package-0", 30.0), Series("rapl", domain("dram:package-0"))
    for moment in range(9 * S, 12 * S, MS):
        if moment == START + 500 * MS:
            bad.begin_outage(moment, "rapl: dram:package-0 cannot be read")
        else:
            bad.add(moment, moment, 12 * moment / 1e9)
    result = account_here(measured_round(ROUND), [good, bad])
    assert result.by_domain["cpu:package-0"].energy_j == pytest.approx(30)
    assert result.energy_j is None
    assert result.reason == "rapl: dram:package-0 cannot be read"
    prefill, decode = result.phases
    # The reading failed during decode.
    assert prefill.energy_j == pytest.approx(42 * 0.4, rel=0.01)
    assert (decode.energy_j, decode.reason) == (None, "rapl: dram:package-0 cannot be read")


def test_without_a_meter_the_round_has_the_reasons() -> None:
    result = account_here(measured_round(ROUND), [], ["nvml: no driver", "rapl: no counter"])
    assert result.energy_j is None
    assert result.reason == "nvml: no driver; rapl: no counter"
    assert result.duration_s == 1.0
    assert result.by_domain == {}


def test_idle_power_that_changed_during_the_round_is_uncertain() -> None:
    warm = Wave(((9 * S, 50.0), (START, 500.0), (END, 80.0)))
    result = account_here(measured_round(iteration(START, END)), [read_at(Sensor(warm, LATCH), READS)])
    assert result.idle_power_w == pytest.approx(65, abs=1)
    assert result.idle_power_u_w == pytest.approx(30 / math.sqrt(12), rel=0.1)


def test_tokens_are_summed_over_requests() -> None:
    requests = tuple(RequestTimeline(input_tokens=i, output_tokens=o) for i, o in ((3, 16), (9, 2), (5, 1)))
    part = Iteration(start_ns=START, end_ns=END, requests=requests)
    result = account_here(measured_round(part), [constant("cpu:package-0", 30.0)])
    assert result.tokens is not None
    assert (result.tokens.input, result.tokens.output, result.requests) == (17, 19, 3)


def request(output_tokens: int, first_ms: int | None, last_ms: int | None) -> RequestTimeline:
    return RequestTimeline(
        input_tokens=5,
        output_tokens=output_tokens,
        first_token_ns=None if first_ms is None else first_ms * MS,
        last_token_ns=None if last_ms is None else last_ms * MS,
    )


def round_of(*ranks: tuple[int, list[RequestTimeline]]) -> Timeline:
    return Timeline(
        ranks=tuple(
            RankTimeline(
                rank=i,
                iterations=(Iteration(start_ns=start * MS, end_ns=5000 * MS, requests=tuple(requests)),),
                cpu_time_s=0.0,
            )
            for i, (start, requests) in enumerate(ranks)
        )
    )


def test_latencies_are_means_over_the_requests_of_all_ranks() -> None:
    timeline = round_of(
        (1000, [request(16, 1100, 1850), request(1, 1100, 1100)]),
        (1040, [request(3, 1340, 1440)]),
    )
    # 100 and 100 ms from the start of the first rank, 300 ms from that of the second.
    assert time_to_first_token_s(timeline) == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    # 750 ms over 15 gaps, 100 ms over 2; one token has no gap.
    assert inter_token_latency_s(timeline) == pytest.approx((0.05 + 0.05) / 2)


def test_short_and_long_requests_have_the_same_weight() -> None:
    timeline = round_of((0, [request(101, 0, 1000), request(2, 0, 30)]))
    assert inter_token_latency_s(timeline) == pytest.approx((0.01 + 0.03) / 2)


def test_a_single_token_has_a_first_token_time_but_no_inter_token_latency() -> None:
    timeline = round_of((0, [request(1, 40, 40)]))
    assert time_to_first_token_s(timeline) == pytest.approx(0.04)
    assert inter_token_latency_s(timeline) is None


@pytest.mark.parametrize(
    "requests", [[], [request(4, None, None)], [request(4, 1, 9), request(4, None, None)]]
)
def test_latencies_that_the_backend_does_not_report_are_missing(requests: list[RequestTimeline]) -> None:
    timeline = round_of((0, requests))
    assert time_to_first_token_s(timeline) is None
    assert inter_token_latency_s(timeline) is None


@pytest.mark.parametrize("late_ns", [50_000, 20 * MS], ids=["quiet", "busy"])
@pytest.mark.parametrize("work_ns", [MS, 50 * MS], ids=["1 ms", "50 ms"])
def test_work_in_this_process_is_counted_in_full_however_late_it_is_read(work_ns: int, late_ns: int) -> None:
    """On a busy machine the thread may wait for a CPU between the work and the reading after it."""
    end_ns, watts = START + work_ns, 3.5
    work_j = watts * work_ns / 1e9
    series = Series("estimate", domain("cpu:processes", max_age_s=1e-4)._replace(rests=True))
    reads = [(START - 500 * MS, 0.0), (START - 300 * MS, 0.5), (START - 40_000, 0.5)]
    reads += [(end_ns + late_ns, 0.5 + work_j), (end_ns + late_ns + 100 * MS, 0.5 + work_j)]
    for moment_ns, energy_j in reads:
        series.add(moment_ns, moment_ns + 20_000, energy_j)
    series.late.append((end_ns - 200 * MS, end_ns + late_ns))
    measured = replace(measured_round(iteration(START, end_ns)), in_reader=True)
    result = account_here(measured, [series])
    assert result.energy_j is not None
    assert result.energy_u_j is not None
    assert result.energy_j == pytest.approx(work_j, rel=0.1)
    assert abs(result.energy_j - work_j) < 2 * result.energy_u_j
    # A counter of CPU time loses nothing while it is not read.
    assert "doubtful" not in [flag.name for flag in result.flags]


@pytest.mark.parametrize("latch_ms", [20, 100])
def test_power_that_still_falls_after_the_work_widens_the_round_and_flags_it(latch_ms: int) -> None:
    """It falls from 400 to 50 W with a time constant of 50 ms, as clocks and fans do."""
    decay = [(END + n * MS, 50 + 350 * math.exp(-n / 50)) for n in range(1000)]
    wave = Wave(((START - 3 * S, 50.0), (START, 400.0), *decay, (END + 9 * S, 50.0)))
    gaps = (START - 450 * MS, END + 450 * MS)
    for phase in range(5):
        sensor = Sensor(wave, latch_ms * MS, phase * latch_ms * MS // 5)
        series = read_at(sensor, range(START - S, END + S, MS), domain(period_s=latch_ms / 1e3))
        result = account_here(measured_round(ROUND, gaps=gaps), [series])
        assert result.energy_j is not None
        assert result.energy_u_j is not None
        assert abs(result.energy_j - wave.joules(START, END)) <= 2 * result.energy_u_j
        decode = result.phases[1]
        assert decode.energy_j is not None
        assert decode.energy_u_j is not None
        assert abs(decode.energy_j - wave.joules(BORDER, END)) <= 2 * decode.energy_u_j
        assert "doubtful" in [flag.name for flag in result.flags]


@pytest.mark.parametrize("gap_ms", [250, 350])
def test_short_gaps_show_that_power_still_falls(gap_ms: int) -> None:
    """A gap of two or three ticks is compared with the other gap, and with itself."""
    decay = [(END + n * MS, 50 + 350 * math.exp(-n / 50)) for n in range(1000)]
    wave = Wave(((START - 3 * S, 50.0), (START, 400.0), *decay, (END + 9 * S, 50.0)))
    gaps = (START - gap_ms * MS, END + gap_ms * MS)
    for phase in range(5):
        sensor = Sensor(wave, 100 * MS, phase * 20 * MS)
        series = read_at(sensor, range(START - S, END + S, MS), domain(period_s=0.1))
        result = account_here(measured_round(ROUND, gaps=gaps), [series])
        if result.energy_j is None or result.energy_u_j is None:
            continue
        assert abs(result.energy_j - wave.joules(START, END)) <= 2 * result.energy_u_j
        assert "doubtful" in [flag.name for flag in result.flags]


def test_idle_power_that_fluctuates_is_part_of_the_uncertainty() -> None:
    """By a fifth, every 5 to 50 ms, around work of 200 ms: two or three steps show how much."""
    scores = []
    for seed in range(80):
        rng = Random(seed)
        start_ns = START + rng.randrange(100 * MS)
        end_ns, moment_ns, steps = start_ns + 200 * MS, START - 3 * S, []
        while moment_ns < END + 2 * S:
            moment_ns += rng.randrange(5, 50) * MS
            steps.append(
                (moment_ns, 400.0 if start_ns <= moment_ns < end_ns else 80 * (1 + rng.gauss(0, 0.2)))
            )
        wave = Wave(tuple(sorted([*steps, (start_ns, 400.0), (end_ns, 80.0), (END + 9 * S, 80.0)])))
        sensor = Sensor(wave, 100 * MS, rng.randrange(100 * MS))
        series = read_at(sensor, range(START - S, END + S, MS), domain(period_s=0.1))
        before = quiet_power(series, start_ns - 350 * MS, start_ns)
        after = quiet_power(series, end_ns, end_ns + 350 * MS)
        energy = energy_between(series, start_ns, end_ns, before, after)
        assert energy.energy_j is not None
        scores.append(abs(energy.energy_j - wave.joules(start_ns, end_ns)) / (energy.u_j or 1.0))
    assert sum(score <= 2 for score in scores) >= 0.9 * len(scores)


def test_quiet_gaps_of_steady_power_are_not_doubted() -> None:
    for phase in range(10):
        series = read_at(Sensor(WAVE, LATCH, phase * LATCH // 10), READS)
        result = account_here(measured_round(ROUND), [series])
        assert "doubtful" not in [flag.name for flag in result.flags]


def test_a_decode_of_no_length_is_no_error() -> None:
    """With one output token, the first token is the last."""
    result = account_here(measured_round(iteration(START, END, END)), [read_at(Sensor(WAVE, LATCH), READS)])
    assert result.energy_j == pytest.approx(320, abs=1)
    assert [phase.duration_s for phase in result.phases] == [1.0, 0.0]


def test_prefill_at_the_start_of_a_round_is_no_doubt() -> None:
    """A peak of half a tick, as prefill in front of a long decode."""
    steps = ((START, 600.0), (START + 50 * MS, 250.0), (END, 80.0))
    wave = Wave(((START - 3 * S, 80.0), *steps, (END + 9 * S, 80.0)))
    gaps = (START - 450 * MS, END + 450 * MS)
    for phase in range(10):
        sensor = Sensor(wave, 100 * MS, phase * 10 * MS)
        series = read_at(sensor, range(START - S, END + S, MS), domain(period_s=0.1))
        result = account_here(measured_round(ROUND, gaps=gaps), [series])
        assert result.energy_j == pytest.approx(wave.joules(START, END), rel=0.01)
        assert "doubtful" not in [flag.name for flag in result.flags]


def test_failures_of_shards_of_one_model_are_counted_once() -> None:
    failed = Iteration(start_ns=0, end_ns=MS, failures=("503", "timeout"))
    ranks = [
        RankTimeline(rank=rank, iterations=(failed,), cpu_time_s=0.0, repeats_others=rank == 1)
        for rank in range(3)
    ]
    # The second rank reports what the first has reported.
    assert Timeline(ranks=tuple(ranks)).failures == ("503", "timeout") * 2
