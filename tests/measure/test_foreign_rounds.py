# SPDX-License-Identifier: Apache-2.0
"""Rounds that other tools run: which are accounted one by one, which are joined, and their energy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from pytest_llenergy.energy.attribution import PACKAGE_RATIO
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.measure.foreign_rounds import (
    STRETCH_S,
    ForeignRounds,
    account_stretches,
    joined_flags,
    min_stretch_s,
    split_into_stretches,
)
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Round

from ..energy.waves import MS, S, Sensor, Wave, domain, read_at
from .marks import iteration, measured_round

START = 10 * S
GAP = 400 * MS


def rounds_of(
    lengths_ns: Sequence[int], between_ns: int = 0, every_ns: int = 50 * MS, iterations: int = 1
) -> ForeignRounds:
    """Return consecutive rounds, ``between_ns`` apart, with their ends noted as the fixture notes them."""
    ends: list[tuple[int, int]] = []
    now_ns, due_ns = START, 0
    for over, length_ns in enumerate(lengths_ns, 1):
        now_ns += length_ns
        if now_ns >= due_ns or over == len(lengths_ns):
            ends.append((over, now_ns))
            due_ns = now_ns + every_ns
        now_ns += between_ns
    return ForeignRounds([length_ns / 1e9 for length_ns in lengths_ns], iterations, ends, START)


def whole_of(own: ForeignRounds) -> MeasuredRound:
    """Return the measured whole: a gap, other work, the rounds, other work, a gap."""
    start_ns, end_ns = START - 30 * MS, own.ends[-1][1] + 30 * MS
    return measured_round(iteration(start_ns, end_ns), gaps=(start_ns - GAP, end_ns + GAP))


def wave_of(own: ForeignRounds, busy_w: float, between_w: float, between_ns: int) -> Wave:
    """Return a wave of 50 W in the gaps, ``busy_w`` in rounds and ``between_w`` between them."""
    whole = whole_of(own)
    steps = [(START - 2 * S, 50.0), (whole.timeline.start_ns, busy_w)]
    now_ns = START
    for duration_s in own.durations_s:
        steps += [(now_ns, busy_w), (now_ns + round(duration_s * 1e9), between_w)]
        now_ns += round(duration_s * 1e9) + between_ns
    steps += [(own.ends[-1][1], busy_w), (whole.timeline.end_ns, 50.0)]
    return Wave(tuple(steps))


def accounted(
    own: ForeignRounds,
    wave: Wave,
    latch_ns: int = 20 * MS,
    phase_ns: int = 0,
    cpu_ratio: float | None = None,
) -> list[Round]:
    reads = range(START - 900 * MS, own.ends[-1][1] + 2 * GAP, MS)
    trace = [read_at(Sensor(wave, latch_ns, phase_ns), reads)]
    trace[0].domain = trace[0].domain._replace(cpu_ratio=cpu_ratio)
    return account_stretches(split_into_stretches(own, min_stretch_s(trace)), whole_of(own), trace)


@pytest.mark.parametrize("late_ns", [1_000, 9_000, 40_000])
def test_very_short_rounds_that_were_read_right_before_and_after_have_joules(late_ns: int) -> None:
    """A hundred rounds of a microsecond at 10 W; readings are up to 10 µs old, as those of CPU time."""
    own = rounds_of([1_000] * 100, between_ns=0)
    end_ns = own.ends[-1][1]
    resting = domain("cpu:processes", max_age_s=1e-5)._replace(rests=True, resolution_j=1e-7)
    series = Series("estimate", resting)
    for moment_ns in (START - 20_000, end_ns + late_ns):
        # The thread also runs on its way between the readings and the rounds.
        series.add(moment_ns, moment_ns + 500, 10.0 * moment_ns / 1e9)
    whole = measured_round(iteration(START, end_ns), gaps=(START, end_ns))
    (result,) = account_stretches(split_into_stretches(own, min_stretch_s([series])), whole, [series])
    assert result.energy_j is not None
    assert result.energy_u_j is not None
    assert abs(result.energy_j - 0.001) <= 2 * result.energy_u_j < 0.001


class TestStretches:
    def test_long_rounds_are_accounted_one_by_one(self) -> None:
        own = rounds_of([200 * MS] * 12, between_ns=5 * MS)
        found = split_into_stretches(own, 0.15)
        assert [(each.rounds, each.iterations) for each in found] == [(1, 1)] * 12
        assert all(each.end_ns - each.start_ns == 200 * MS for each in found)
        assert joined_flags(own, found) == []

    def test_short_rounds_are_joined_into_a_few_long_stretches(self) -> None:
        own = rounds_of([10_000] * 100_000, between_ns=1_000, iterations=7)
        found = split_into_stretches(own, 0.15)
        assert sum(each.rounds for each in found) == 100_000
        assert sum(each.iterations for each in found) == 700_000
        assert 6 <= len(found) <= 7
        assert all(each.end_ns - each.start_ns >= 0.75 * 0.15 * S for each in found)
        assert all(after.start_ns == before.end_ns for before, after in pairwise(found))
        assert [each.share for each in found] == pytest.approx([10 / 11] * len(found), rel=0.01)
        (flag,) = joined_flags(own, found)
        assert flag.name == "meter"
        assert "100000 rounds of 0.01 ms are joined into" in flag.detail
        assert "91%" in flag.detail

    def test_a_second_of_rounds_gives_four_stretches_with_a_slow_counter(self) -> None:
        """A verdict needs four, even if the second was cut a little short."""
        for length_ns in (5_000, 700_000, 9 * MS, 33 * MS, 70 * MS, 149 * MS):
            found = split_into_stretches(rounds_of([length_ns] * (850 * MS // length_ns)), 0.2)
            assert len(found) >= 4 or length_ns > 100 * MS, length_ns

    def test_rounds_too_short_for_two_stretches_form_one(self) -> None:
        found = split_into_stretches(rounds_of([2 * MS] * 20), 0.15)
        assert [each.rounds for each in found] == [20]
        assert found[0].timed_s == pytest.approx(0.04)

    def test_resolvable_rounds_far_apart_are_not_joined(self) -> None:
        own = rounds_of([60 * MS] * 5, between_ns=500 * MS)
        found = split_into_stretches(own, 0.15)
        assert [each.rounds for each in found] == [1] * 5
        assert all(each.end_ns - each.start_ns == 60 * MS for each in found)

    def test_the_slowest_counter_decides_the_minimum_length_of_a_stretch(self) -> None:
        assert min_stretch_s([]) == STRETCH_S
        slow = Series("nvml", domain(period_s=0.1))
        assert min_stretch_s([Series("rapl", domain("b", period_s=0.001)), slow]) == pytest.approx(0.2)
        model = Series("estimate", domain(period_s=0.01, max_age_s=0.01))
        assert min_stretch_s([model]) == pytest.approx(0.1)


class TestJoules:
    @pytest.mark.parametrize("latch_ns", [20 * MS, 100 * MS])
    def test_the_energy_of_long_rounds_agrees_with_the_truth(self, latch_ns: int) -> None:
        rng = Random(1)
        wide = 0
        for phase in range(20):
            lengths = [rng.randrange(250 * MS, 500 * MS) for _ in range(5)]
            own = rounds_of(lengths, between_ns=200 * MS)
            wave = wave_of(own, 400.0, 120.0, 200 * MS)
            rounds = accounted(own, wave, latch_ns, phase * latch_ns // 20)
            assert len(rounds) == 5
            for round_, length_ns in zip(rounds, lengths, strict=True):
                assert round_.energy_j is not None
                assert round_.energy_u_j is not None
                wide += abs(round_.energy_j - 400 * length_ns / S) > 2 * round_.energy_u_j
                assert round_.idle_power_w == pytest.approx(50, rel=0.05)
        assert wide <= 10, "of 100; two standard uncertainties cover 95 %"

    @pytest.mark.parametrize("cpu_ratio", [None, PACKAGE_RATIO], ids=["board", "package"])
    @pytest.mark.parametrize(
        ("busy_w", "between_w"),
        [(400.0, 50.0), (400.0, 200.0), (400.0, 400.0), (400.0, 600.0), (53.0, 100.0)],
    )
    def test_energy_between_joined_rounds_is_not_counted(
        self, busy_w: float, between_w: float, cpu_ratio: float | None
    ) -> None:
        """The assumed limits are nothing and twice the power, also of rounds that draw little above idle."""
        own = rounds_of([900_000] * 1000, between_ns=100_000, every_ns=50 * MS)
        rounds = accounted(own, wave_of(own, busy_w, between_w, 100_000), cpu_ratio=cpu_ratio)
        assert 4 <= len(rounds) <= 10
        for round_ in rounds:
            assert round_.energy_j is not None
            assert round_.energy_u_absolute_j is not None
            true_j = busy_w * round_.duration_s
            assert abs(round_.energy_j - true_j) <= 2 * round_.energy_u_absolute_j
            assert round_.energy_u_absolute_j < 0.1 * round_.energy_j

    @pytest.mark.parametrize("gaps_w", [(100.0, 100.0), (300.0, 400.0), (300.0, 100.0)], ids=str)
    def test_a_board_may_draw_less_between_rounds_than_in_the_gaps(self, gaps_w: tuple[float, float]) -> None:
        own = rounds_of([4 * MS] * 200, between_ns=2 * MS)
        (begin_ns, _), *steps, (end_ns, _) = wave_of(own, 400.0, 100.0, 2 * MS).steps
        wave = Wave(((begin_ns, gaps_w[0]), *steps, (end_ns, gaps_w[1])))
        for round_ in accounted(own, wave):
            assert round_.energy_j is not None
            assert round_.energy_u_absolute_j is not None
            error_j = round_.energy_j - 400.0 * round_.duration_s
            assert abs(error_j) <= 2 * round_.energy_u_absolute_j < 0.8 * round_.energy_j

    def test_only_the_energy_of_the_timed_part_is_counted(self) -> None:
        own = rounds_of([900_000] * 1000, between_ns=100_000)
        rounds = accounted(own, wave_of(own, 400.0, 400.0, 100_000))
        assert sum(round_.duration_s for round_ in rounds) == pytest.approx(0.9)
        assert sum(round_.energy_j or 0.0 for round_ in rounds) == pytest.approx(360, rel=0.01)
        assert sum(round_.iterations for round_ in rounds) == 1000

    def test_rounds_that_cannot_be_separated_from_other_work_have_no_energy(self) -> None:
        own = rounds_of([200_000] * 1000, between_ns=800_000)
        for round_ in accounted(own, wave_of(own, 400.0, 100.0, 800_000)):
            assert round_.energy_j is None
            assert round_.reason is not None
            assert round_.reason.startswith("not resolvable: the rounds are too short to be separated")

    @pytest.mark.parametrize(("length_ms", "between_ms"), [(300, 200), (200, 100), (230, 70), (300, 207)])
    def test_the_metric_is_right_also_if_rounds_keep_step_with_the_counter(
        self, length_ms: int, between_ms: int
    ) -> None:
        """All of them then have the same error, which does not average out."""
        own = rounds_of([length_ms * MS] * 9, between_ns=between_ms * MS)
        for phase_ms in range(0, 100, 10):
            wave = wave_of(own, 400.0, 120.0, between_ms * MS)
            metric = compute_metrics(accounted(own, wave, 100 * MS, phase_ms * MS), None)["energy_j"]
            assert metric.value is not None
            assert metric.uncertainty is not None
            assert abs(metric.value - 0.4 * length_ms) <= 2 * metric.uncertainty
            assert metric.uncertainty < 0.15 * metric.value

    def test_without_meters_a_stretch_has_the_reason(self) -> None:
        own = rounds_of([200 * MS] * 4)
        found = split_into_stretches(own, min_stretch_s([]))
        round_ = account_stretches(found, whole_of(own), [], ["no counter here"])[0]
        assert (round_.energy_j, round_.reason) == (None, "no counter here")
        assert round_.duration_s == pytest.approx(0.2)
        assert [flag.name for flag in round_.flags] == ["unmeasured"]
