# SPDX-License-Identifier: Apache-2.0
"""The power trace of a round: it adds up to the energy of the round and shows the true power."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.measure.power_trace import MAX_SPANS, MAX_STEPS, median_round_index, power_trace
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.power_trace import DomainPower, PowerTrace

from ..compare.runs import SPOILED, round_of
from ..energy.waves import MS, SHAPES, S, Sensor, Wave, domain, read_at
from .marks import ReadBefore, account_here, iteration, measured_round

START, BORDER, END = 10 * S, 10 * S + 400 * MS, 11 * S
WAVE = Wave(((9 * S, 50.0), (START, 500.0), (BORDER, 200.0), (END, 50.0)))
READS = range(9 * S + 5 * MS, 12 * S, MS)
LATCH = 20 * MS
ROUND = measured_round(iteration(START, END, BORDER))


def trace_of(round_: MeasuredRound, *trace: Series) -> PowerTrace:
    found = power_trace(round_, [ReadBefore(trace)])
    assert found is not None
    return found


def energy_of(course: DomainPower, start_s: float, end_s: float) -> float:
    steps = zip(pairwise(course.edges_s), course.power_w, strict=True)
    return sum(watts * (b - a) for (a, b), watts in steps if start_s <= a and b <= end_s)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.__name__))
@pytest.mark.parametrize("latch_ms", [0, 20, 100])
def test_the_trace_adds_up_to_the_measured_and_the_true_energy(shape: object, latch_ms: int) -> None:
    assert callable(shape)
    steps = shape(Random(latch_ms), START, END)
    wave = Wave(((8 * S, 50.0), *steps, (END, 50.0)))
    sensor = Sensor(wave, latch_ms * MS, jitter_ns=latch_ms * MS // 20)
    # A continuous counter is not read every millisecond.
    meter_domain = domain(max_age_s=1e-9) if latch_ms == 0 else domain()
    series = read_at(sensor, range(8 * S + 5 * MS, 13 * S, 7 * MS if latch_ms == 0 else MS), meter_domain)
    round_ = measured_round(iteration(START, END), gaps=(9 * S, 12 * S))
    result = account_here(round_, [series])
    course = trace_of(round_, series).by_domain["gpu:GPU-a"]
    assert result.energy_j is not None
    assert result.energy_u_j is not None
    assert energy_of(course, 0.0, 1.0) == pytest.approx(result.energy_j, rel=1e-5)
    assert abs(energy_of(course, 0.0, 1.0) - wave.joules(START, END)) <= 4 * result.energy_u_j
    assert all(watts >= 0 for watts in course.power_w)


def test_the_trace_shows_the_true_power_and_the_quiet_gaps() -> None:
    course = trace_of(ROUND, read_at(Sensor(WAVE, LATCH), READS)).by_domain["gpu:GPU-a"]
    assert course.edges_s[0] < 0.0 < 1.0 < course.edges_s[-1]
    assert {0.0, 1.0} < set(course.edges_s)
    middles = [(a + b) / 2 for a, b in pairwise(course.edges_s)]
    for at_s, watts in zip(middles, course.power_w, strict=True):
        # A tick may span a change of power.
        if min(abs(at_s - edge_s) for edge_s in (0.0, 0.4, 1.0)) > 0.02:
            true_w = 500 if 0 < at_s < 0.4 else 200 if 0.4 < at_s < 1 else 50
            assert watts == pytest.approx(true_w, rel=0.1)


def test_a_running_average_is_dated_back() -> None:
    """Readings average 100 ms, so they lag by 50 ms."""
    series = Series("nvml", domain(max_age_s=1e-9, smear_s=0.1))
    for moment in range(9 * S, 12 * S, 10 * MS):
        parts = range(moment - 100 * MS, moment, MS)
        series.add(moment, moment, sum(WAVE.energy_j(part) for part in parts) / 100)
    round_ = measured_round(iteration(START, END), gaps=(9 * S + 500 * MS, 11 * S + 500 * MS))
    course = trace_of(round_, series).by_domain["gpu:GPU-a"]
    result = account_here(round_, [series])
    assert energy_of(course, 0.0, 1.0) == pytest.approx(result.energy_j, rel=1e-5)
    middle = next(
        w for (a, b), w in zip(pairwise(course.edges_s), course.power_w, strict=True) if a <= 0.3 < b
    )
    assert middle == pytest.approx(500, rel=0.02)
    assert max(course.edges_s) <= 1.5


def test_phases_are_in_order_and_estimates_are_marked() -> None:
    parts = [iteration(start, start + 250 * MS, start + 100 * MS) for start in range(START, END, 250 * MS)]
    series = Series("guess", domain("cpu:host", max_age_s=1e-9)._replace(kind="estimated"))
    for moment in READS:
        series.add(moment, moment, 12 * moment / 1e9)
    found = trace_of(measured_round(*parts), series)
    assert [span.name for span in found.spans] == ["prefill", "decode"] * 4
    assert [(span.start_s, span.end_s) for span in found.spans[:3]] == [(0.0, 0.1), (0.1, 0.25), (0.25, 0.35)]
    assert (found.start_s, found.duration_s) == (10.0, 1.0)
    assert found.by_domain["cpu:host"].kind == "estimated"


def test_many_ticks_are_merged_and_many_phases_are_left_out() -> None:
    reads = range(9 * S + 5 * MS, 12 * S, MS)
    series = read_at(Sensor(WAVE, 0), reads, domain(max_age_s=1e-9))
    many = [iteration(start, start + 10 * MS, start + MS) for start in range(START, END, 10 * MS)]
    found = trace_of(measured_round(*many), series)
    course = found.by_domain["gpu:GPU-a"]
    assert MAX_STEPS / 2 < len(course.power_w) <= MAX_STEPS
    assert energy_of(course, 0.0, 1.0) == pytest.approx(WAVE.joules(START, END), rel=1e-3)
    assert 2 * len(many) > MAX_SPANS
    assert found.spans == []


def test_without_quiet_gaps_there_is_no_trace() -> None:
    gaps = (START - 15 * MS, END + 250 * MS)
    series = read_at(Sensor(WAVE, LATCH), READS)
    assert power_trace(measured_round(iteration(START, END), gaps=gaps), [ReadBefore([series])]) is None
    assert power_trace(ROUND, [ReadBefore([])]) is None


def test_the_traced_round_is_the_valid_one_with_median_energy() -> None:
    rounds = [round_of(each) for each in (5.0, 9.0, 7.0, None)]
    assert median_round_index(rounds) == 2
    assert median_round_index(rounds[:2]) == 0
    spoiled = [msgspec.structs.replace(round_, flags=[SPOILED]) for round_ in rounds]
    assert median_round_index(spoiled) is None
    assert median_round_index([spoiled[0], rounds[1]]) == 1
    assert median_round_index([]) is None
