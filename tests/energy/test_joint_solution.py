# SPDX-License-Identifier: Apache-2.0
"""Windows and phases that share ticks of a counter, against waves of known energy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from statistics import fmean, median

import pytest

from pytest_llenergy.energy.joint_solution import Segment, segments_between, solve_jointly
from pytest_llenergy.energy.trace import Mark, Series
from pytest_llenergy.energy.uncertainty import Variances
from pytest_llenergy.energy.window_arithmetic import energy_between
from tests.measure.marks import account_here, iteration, measured_round

from . import worlds
from .watching import Spell, simulate_reader
from .waves import EPOCH, MS, S, Sensor, Wave, domain, read_at
from .worlds import WORLDS, World, even, loop, phases, uneven

SEEDS = 8


@pytest.mark.parametrize("rest_ms", [10, 100])
@pytest.mark.parametrize("length_ms", [50, 100, 300])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
@pytest.mark.slow
def test_two_standard_uncertainties_cover_windows_in_a_loop(
    world: World, length_ms: int, rest_ms: int
) -> None:
    results = [each for seed in range(SEEDS) for each in loop(Random(seed), world, length_ms, rest_ms)]
    found = [each for each in results if each.energy.energy_j is not None]
    assert len(found) >= 0.7 * len(results)
    # Windows of one loop share their error, so that few loops are few samples.
    assert fmean(abs(each.score) <= 2 for each in found) >= 0.85
    assert fmean(abs(each.score) <= 3 for each in found) >= 0.95


@pytest.mark.parametrize("rest_ms", [10, 50, 100])
@pytest.mark.slow
def test_windows_of_a_tick_in_a_loop_are_right_to_two_percent(rest_ms: int) -> None:
    """Read at both ends, or taken alone, each would miss up to a fifth of its energy.

    With rests of 100 ms, two ticks pass from one window to the next, so that they keep step for a while.
    """
    errors = []
    for seed in range(SEEDS):
        results = loop(Random(seed), even, 100, rest_ms)
        true_j = sum(each.true_j for each in results)
        error_j = sum(each.energy.energy_j or 0.0 for each in results) - true_j
        assert abs(error_j) <= 2 * sum(each.energy.u_j or 0.0 for each in results)
        errors.append(abs(error_j) / true_j)
    assert median(errors) <= 0.02
    assert rest_ms == 100 or max(errors) <= 0.03


@pytest.mark.parametrize(("usual_w", "own_w"), [(300, 330), (300, 400), (300, 700), (500, 100)])
def test_a_window_unlike_others_of_its_name_keeps_its_own_energy(usual_w: int, own_w: int) -> None:
    """As a request that hits the cache, or a step that also writes a checkpoint."""
    rng, now_ns = Random(own_w), EPOCH
    steps, windows = [(EPOCH - 4 * S, 80.0)], []
    for index in range(30):
        end_ns = now_ns + rng.randrange(57 * MS, 63 * MS)
        steps += [(now_ns, float(own_w if index == 10 else usual_w)), (end_ns, 80.0)]
        windows.append((now_ns, end_ns))
        now_ns = end_ns + rng.randrange(57 * MS, 63 * MS)
    wave = Wave((*steps, (now_ns + 9 * S, 80.0)))
    marks = sorted(
        [Mark(start, begins=True, name="step") for start, _ in windows]
        + [Mark(end, begins=False, name="step") for _, end in windows]
    )
    reads = range(EPOCH - 2 * S, now_ns + S, 4 * MS)
    for phase_ms in range(0, 100, 20):
        series = read_at(Sensor(wave, 100 * MS, phase_ms * MS), reads, domain(period_s=0.1))
        energy = energy_between(series, *windows[10], marks=marks)
        assert energy.energy_j is not None
        assert energy.u_j is not None
        assert abs(energy.energy_j - wave.joules(*windows[10])) <= 2 * energy.u_j


def test_the_window_around_thousands_of_others_needs_only_its_edges() -> None:
    """Solved for all of them, it would take minutes and gigabytes."""
    windows = [(EPOCH + n * 100 * MS, EPOCH + n * 100 * MS + 50 * MS) for n in range(3000)]
    steps = [step for start, end in windows for step in ((start, 300.0), (end, 80.0))]
    end_ns = windows[-1][1]
    wave = Wave(((EPOCH - 4 * S, 80.0), *steps, (end_ns + 9 * S, 80.0)))
    marks = sorted(
        [Mark(start, begins=True, name="step") for start, _ in windows]
        + [Mark(end, begins=False, name="step") for _, end in windows]
    )
    reads = range(EPOCH - S, end_ns + S, 5 * MS)
    series = read_at(Sensor(wave, 100 * MS, 30 * MS), reads, domain(period_s=0.1))
    segments = segments_between(marks[:40], EPOCH - S, end_ns + S, 100 * MS, (EPOCH + S, end_ns - S))
    assert len(segments) < 30
    energy = energy_between(series, EPOCH, end_ns, marks=marks)
    assert energy.energy_j == pytest.approx(wave.joules(EPOCH, end_ns), rel=0.001)


def test_windows_beside_a_wrong_stretch_of_the_counter_are_solved_without_it() -> None:
    windows = [(EPOCH + n * 97 * MS, EPOCH + n * 97 * MS + 50 * MS) for n in range(60)]
    steps = [step for start, end in windows for step in ((start, 500.0), (end, 100.0))]
    wave = Wave(((EPOCH - 4 * S, 100.0), *steps, (windows[-1][1] + 9 * S, 100.0)))
    marks = sorted(Mark(edge, begins=edge == each[0], name="step") for each in windows for edge in each)
    sensor, series = Sensor(wave, 100 * MS, 30 * MS), Series("nvml", domain(period_s=0.1))
    for moment in range(EPOCH - S, windows[-1][1] + S, 4 * MS):
        wrong_j = 50.0 if EPOCH + 2500 * MS <= moment < EPOCH + 2750 * MS else 0.0
        series.add(moment, moment, sensor.counter_j(moment) - wrong_j)
    found = [(each, energy_between(series, *each, marks=marks)) for each in windows]
    known = [(wave.joules(*each), energy) for each, energy in found if energy.energy_j is not None]
    assert 50 <= len(known) < 60
    for true_j, energy in known:
        assert energy.energy_j == pytest.approx(true_j, rel=0.15, abs=3 * (energy.u_j or 0.0))


@pytest.mark.parametrize(("length_ms", "rest_ms"), [(50, 50), (100, 50), (100, 100), (300, 10)])
@pytest.mark.slow
def test_a_loop_of_even_power_read_at_its_ticks_is_exact(length_ms: int, rest_ms: int) -> None:
    """At its ends too, where marks that are not solved, and the power around the loop, are near."""

    def read(rng: Random, wave: Wave, work: Sequence[tuple[int, int]], latch_ms: int) -> Series:
        sensor = Sensor(wave, latch_ms * MS, rng.randrange(latch_ms * MS))
        numbers = range((work[0][0] - 2 * S) // (latch_ms * MS), (work[-1][1] + S) // (latch_ms * MS))
        ticks = [sensor.phase_ns + number * latch_ms * MS for number in numbers]
        return read_at(
            sensor, (each for tick in ticks for each in (tick - 1, tick)), domain(period_s=latch_ms / 1e3)
        )

    for seed in range(4):
        results = loop(Random(seed), even, length_ms, rest_ms, read=read)
        found = [each for each in results if each.energy.energy_j is not None]
        assert len(found) >= 0.8 * len(results)
        assert all(abs((each.energy.energy_j or 0.0) / each.true_j - 1) < 0.005 for each in found)


@pytest.mark.parametrize(("length_ms", "rest_ms"), [(100, 100), (100, 50), (80, 20)])
@pytest.mark.parametrize("world", [even, uneven])
@pytest.mark.slow
def test_windows_of_different_names_are_solved_together(world: World, length_ms: int, rest_ms: int) -> None:
    results = [
        each
        for seed in range(SEEDS)
        for each in loop(Random(seed), world, length_ms, rest_ms, named="batch {}".format)
    ]
    found = [each for each in results if each.energy.energy_j is not None]
    assert len(found) >= 0.8 * len(results)
    assert fmean(abs(each.score) <= 2 for each in found) >= 0.95
    assert abs(fmean((each.energy.energy_j or 0.0) / each.true_j - 1 for each in found)) < 0.04


@pytest.mark.parametrize("highest_w", [None, 700.0])
def test_a_few_short_windows_that_share_ticks_have_a_wide_energy_if_power_is_bounded(
    highest_w: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "domain", partial(domain, highest_w=highest_w))
    for length_ms, rest_ms in ((60, 20), (60, 60)):
        results = [
            each for seed in range(10) for each in loop(Random(seed), even, length_ms, rest_ms, repeats=3)
        ]
        found = [each for each in results if each.energy.energy_j is not None]
        if highest_w is None:
            assert not any("window" in (each.energy.reason or "") for each in found)
            assert len(found) < 0.2 * len(results)
        else:
            assert len(found) == len(results)
            assert all(abs(each.score) <= 2 for each in found)


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize(("prefill_ms", "decode_ms"), [(20, 150), (40, 160), (60, 200), (150, 500)])
def test_a_prefill_shorter_than_a_tick_is_told_from_decode(
    prefill_ms: int, decode_ms: int, *, ramp: bool
) -> None:
    found = [phases(Random(seed), prefill_ms, decode_ms, ramp=ramp) for seed in range(2 * SEEDS)]
    for results in zip(*found, strict=True):
        assert fmean(abs(each.score) <= 2 for each in results) >= 0.85
        assert all(abs(each.score) <= 3.5 for each in results)
        errors = [abs((each.energy.energy_j or 0.0) / each.true_j - 1) for each in results]
        assert median(errors) <= 0.05
        assert median((each.energy.u_j or 0.0) / each.true_j for each in results) <= 0.12


def test_iterations_in_step_with_the_counter_leave_the_phases_uncertain() -> None:
    """Every tick holds one prefill and one decode: only their sum is known."""
    starts = [EPOCH + n * 100 * MS for n in range(20)]
    steps = [step for start in starts for step in ((start + 30 * MS, 600.0), (start + 60 * MS, 200.0))]
    end_ns = EPOCH + 2 * S + 30 * MS
    wave = Wave(((EPOCH - S, 80.0), *steps, (end_ns, 80.0), (EPOCH + 9 * S, 80.0)))
    reads = range(EPOCH - S + 1, EPOCH + 3 * S, MS)
    series = read_at(Sensor(wave, 100 * MS), reads, domain(period_s=0.1))
    parts = [
        each
        for start in starts
        for each in (
            Segment(start + 30 * MS, start + 60 * MS, "prefill"),
            Segment(start + 60 * MS, start + 130 * MS, "decode"),
        )
    ]
    segments = [Segment(EPOCH - S // 2, EPOCH + 30 * MS, 0), *parts, Segment(end_ns, EPOCH + 3 * S, 1)]
    prefill, both = solve_jointly(series, segments, [range(1, 41, 2), range(1, 41)])
    assert prefill.energy_j is not None
    assert prefill.u_j is not None
    assert prefill.u_j > prefill.energy_j / 10
    assert abs(prefill.energy_j - 600 * 0.03 * 20) <= 2 * prefill.u_j
    assert both.energy_j == pytest.approx(wave.joules(EPOCH + 30 * MS, end_ns), rel=0.01)


def test_segments_carry_the_names_of_the_windows_that_are_open() -> None:
    marks = [
        Mark(100 * MS, begins=True, name="load"),
        Mark(150 * MS, begins=True, name="step"),
        Mark(180 * MS, begins=False, name="step"),
        Mark(200 * MS, begins=False, name="load"),
        Mark(230 * MS, begins=True),
    ]
    found = segments_between(marks, 0, S, 50 * MS)
    labels = [(each.start_ns // MS, each.end_ns // MS, each.label) for each in found]
    assert labels == [
        (0, 100, 0),
        (100, 150, ("load",)),
        (150, 180, ("load", "step")),
        (180, 200, ("load",)),
        (200, 230, ()),
        (230, 1000, 230 * MS),
    ]


def test_errors_from_the_course_of_power_add_up_linearly() -> None:
    """Eight boards that do the same work err the same way."""
    one = Variances(edges=1.0, shape=4.0)
    total = sum((one for _ in range(7)), one)
    assert total.edges == pytest.approx(8)
    assert total.shape == pytest.approx((8 * 2) ** 2)
    assert total.terms().shape_j == pytest.approx(16)


@pytest.mark.parametrize(("prefill_ms", "decode_ms"), [(10, 60), (40, 160)])
def test_phases_of_a_counter_that_is_always_fresh_are_solved_from_its_readings(
    prefill_ms: int, decode_ms: int
) -> None:
    """RAPL: the reader comes every few tens of milliseconds during work, and not at the marks."""
    scores = []
    for seed in range(6):
        rng, now_ns = Random(seed), EPOCH
        iterations, steps, spans = [], [(EPOCH - 8 * S, 20.0)], dict[str, list[tuple[int, int]]]()
        for _ in range(15):
            border_ns = now_ns + round(prefill_ms * MS * rng.uniform(0.95, 1.05))
            end_ns = border_ns + round(decode_ms * MS * rng.uniform(0.95, 1.05))
            iterations.append(iteration(now_ns, end_ns, border_ns=border_ns))
            steps += [(now_ns, 80.0), (border_ns, 50.0)]
            spans.setdefault("prefill", []).append((now_ns, border_ns))
            spans.setdefault("decode", []).append((border_ns, end_ns))
            now_ns = end_ns
        wave = Wave((*steps, (now_ns, 20.0)))
        rapl = domain(period_s=0.001, max_age_s=0.002, highest_w=2000.0)
        gaps = EPOCH - 360 * MS, now_ns + 360 * MS
        spells = [
            Spell(gaps[0], EPOCH, at_work=False),
            Spell(EPOCH, now_ns, at_work=True),
            Spell(now_ns, gaps[1], at_work=False),
        ]
        series = simulate_reader([Sensor(wave, MS)], rng, EPOCH - 3 * S, now_ns + S, rapl, spells)
        for phase in account_here(measured_round(*iterations, gaps=gaps), [series]).phases:
            true_j = sum(wave.joules(*span) for span in spans[phase.name])
            assert phase.energy_j == pytest.approx(true_j, rel=0.06)
            assert phase.energy_j is not None
            assert phase.energy_u_j is not None
            scores.append(abs(phase.energy_j - true_j) / phase.energy_u_j)
    assert fmean(score <= 2 for score in scores) >= 0.95
