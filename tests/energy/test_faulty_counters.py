# SPDX-License-Identifier: Apache-2.0
"""Counters that jump, go back or stand still for a moment: no window near that is wrong without a word."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from random import Random

import pytest

from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable

from .watching import Spell, simulate_reader
from .waves import EPOCH, MS, SHAPES, S, Sensor, Wave, domain

START, END = EPOCH, EPOCH + 900 * MS
LIMIT_W = 700.0
#: Random moments of each fault: in the window, or shortly before or after it.
MOMENTS = 8


@dataclass(frozen=True)
class Fault:
    """How many joules a counter is off, or whether it stands still instead, and then catches up."""

    step_j: float = 0.0
    for_ns: int = 100 * S
    stalls: bool = False
    catches_up: bool = False


@dataclass(frozen=True)
class FaultySensor(Sensor):
    """A sensor with a fault that begins at a moment, or with the first tick from then on."""

    fault: Fault = Fault()
    fault_ns: int = 0
    at_tick: bool = False

    def counter_j(self, time_ns: int) -> float:
        end_ns = self.fault_ns + self.fault.for_ns
        if self.fault.stalls:
            stood_j = Sensor.counter_j(self, min(time_ns, self.fault_ns))
            if time_ns < end_ns:
                return stood_j
            lost_j = 0.0 if self.fault.catches_up else Sensor.counter_j(self, end_ns) - stood_j
            return Sensor.counter_j(self, time_ns) - lost_j
        counter_j = Sensor.counter_j(self, time_ns)
        if self.at_tick:
            time_ns = self._ticks[bisect_right(self._ticks, time_ns, key=lambda tick: tick[0]) - 1][0]
        return counter_j + (self.fault.step_j if self.fault_ns <= time_ns < end_ns else 0.0)


def watch(sensor: Sensor, rng: Random, known: bool = True) -> Series:
    """Read a counter closely from two seconds before the window to a second and a half after it."""
    until_ns = END + 1500 * MS + 3 * sensor.latch_ns
    closely = [Spell(EPOCH - 2 * S, until_ns, at_work=False)]
    meter_domain = domain(period_s=sensor.latch_ns / S if known else None, highest_w=LIMIT_W)
    return simulate_reader([sensor], rng, EPOCH - 2 * S - MS, until_ns, meter_domain, closely)


FAULTS = {
    "jumps up": Fault(150.0),
    "jumps back": Fault(-50.0),
    "up for a moment": Fault(50.0, 250 * MS),
    "back for a moment": Fault(-50.0, 250 * MS),
    "loses 350 ms": Fault(for_ns=350 * MS, stalls=True),
    "stands still for 350 ms": Fault(for_ns=350 * MS, stalls=True, catches_up=True),
}


@pytest.mark.parametrize("at_tick", [False, True], ids=["between ticks", "at a tick"])
@pytest.mark.parametrize("tick_ms", [20, 100])
@pytest.mark.parametrize("name", FAULTS)
def test_no_window_near_a_fault_is_wrong_without_a_word(name: str, tick_ms: int, at_tick: bool) -> None:
    wave = Wave(((EPOCH - 8 * S, 60.0), (EPOCH - S, 400.0), (END + S, 60.0), (END + 9 * S, 60.0)))
    true_j = wave.joules(START, END)
    resolved = 0
    for number in range(MOMENTS):
        rng = Random(f"{name} {tick_ms} {at_tick} {number}")
        moment = rng.randrange(START - 200 * MS, END + 200 * MS)
        phase_ns = rng.randrange(tick_ms * MS)
        sensor = FaultySensor(wave, tick_ms * MS, phase_ns, 0, 0, FAULTS[name], moment, at_tick)
        series = watch(sensor, rng)
        energy = require_resolvable(energy_between(series, START, END), series, START, END)
        if energy.energy_j is None:
            assert energy.reason is not None
            assert "the counter of gpu:GPU-a " in energy.reason
            continue
        resolved += 1
        assert energy.u_j is not None
        assert abs(energy.energy_j - true_j) <= 3 * energy.u_j, (number, energy.energy_j, true_j)
        if FAULTS[name].catches_up and START < moment < END - 350 * MS:
            assert "doubtful" in [flag.name for flag in trace_flags([series], START, END)]
    # A counter that has caught up costs no joules, except in windows that begin or end meanwhile.
    assert resolved >= (1 if FAULTS[name].catches_up else 0)


@pytest.mark.parametrize("tick_ms", [20, 100, 500])
@pytest.mark.parametrize("known", [True, False], ids=["known period", "unknown period"])
def test_a_working_counter_raises_no_alarm(tick_ms: int, known: bool) -> None:
    """Ticks come up to 30 % late, power goes up to the limit, and readings come late or are put off."""
    for number in range(35):
        rng = Random(f"{tick_ms} {known} {number}")
        load = SHAPES[number % len(SHAPES)](rng, START - S // 2, END + S // 2)
        wave = Wave(((EPOCH - 8 * S, 60.0), *load, (END + S // 2, 60.0), (END + 20 * S, 60.0)))
        latch_ns = tick_ms * MS
        sensor = Sensor(wave, latch_ns, rng.randrange(latch_ns), latch_ns * 3 // 10)
        work = [Spell(START, END, at_work=True), Spell(END, END + 2 * S, at_work=False)]
        until_ns = END + S + 3 * latch_ns
        holding_ns = (START, END) if number % 2 else (0, 0)
        meter_domain = domain(period_s=tick_ms / 1e3 if known else None, highest_w=LIMIT_W)
        series = simulate_reader([sensor], rng, EPOCH - 3 * S, until_ns, meter_domain, work, holding_ns)
        assert series.outages == []
        assert series.stalls == []


def series_of(*readings: tuple[int, float], highest_w: float | None = None) -> Series:
    series = Series("nvml", domain(period_s=0.1, highest_w=highest_w))
    for time_ms, energy_j in readings:
        series.add(time_ms * MS, time_ms * MS, energy_j)
    return series


def test_ticks_left_unobserved_are_no_stall() -> None:
    assert series_of((0, 0.0), (100, 30.0), (1100, 330.0), (2100, 630.0)).stalls == []
    stalled = series_of((0, 0.0), (100, 30.0), (200, 30.0), (350, 30.0), (400, 120.0))
    assert stalled.stalls == [(100 * MS, 350 * MS)]
    assert stalled.latest_stall_s(300 * MS, 900 * MS) == pytest.approx(0.25)
    stalled.forget_before(1000 * MS)
    assert stalled.stalls == []


@pytest.mark.parametrize(("shown_j", "missing_j"), [(90.0, 0.0), (30.0, 60.0)])
def test_energy_that_a_counter_does_not_catch_up_after_a_stall_is_uncertain(
    shown_j: float, missing_j: float
) -> None:
    def counter_j(time_ms: int) -> float:
        ticks = time_ms // 100
        return 30.0 * ticks if ticks < 6 else 150.0 + shown_j + 30.0 * (ticks - 8) if ticks >= 8 else 150.0

    series = series_of(*((time_ms, counter_j(time_ms)) for time_ms in range(0, 1500, 5)))
    assert series.stale_j(600 * MS, 650 * MS) == pytest.approx(missing_j)
    energy = energy_between(series, 300 * MS, 1200 * MS)
    assert energy.u_j is not None
    assert energy.u_j >= missing_j
    assert series.stale_j(200 * MS, 300 * MS) == 0


def test_a_counter_that_goes_back_and_returns_is_wrong_at_both_moments() -> None:
    readings = [(ms, ms // 100 * 30.0 - (70.0 if 3000 <= ms < 3200 else 0.0)) for ms in range(0, 6000, 20)]
    fall, returned = series_of(*readings).outages
    assert fall.end_ns // MS == 3000
    assert (returned.start_ns // MS, returned.end_ns // MS) == (3180, 3200)
    assert returned.reason == (
        "nvml: the counter of gpu:GPU-a moved by 100.000 J, after it had gone back by 40.000 J"
    )


def test_a_counter_that_returns_long_after_it_fell_is_wrong() -> None:
    """It falls to 0, counts from there for 2.5 s and comes back; nobody states the highest power."""
    for before_j in (2_000.0, 5_000_000.0):
        readings = [
            (ms, ms // 100 * 10.0 + (0.0 if 3000 <= ms < 5500 else before_j)) for ms in range(0, 8000, 20)
        ]
        series = series_of(*readings)
        reason = series.reason_between(5000 * MS, 5900 * MS)
        assert reason is not None
        assert "the counter of gpu:GPU-a " in reason
        assert series.reason_between(6000 * MS, 6900 * MS) is None


@pytest.mark.parametrize(("peak_j", "wrong"), [(56.0, False), (90.0, True)])
def test_a_device_may_draw_more_than_its_limit_for_a_tick(peak_j: float, wrong: bool) -> None:
    """An H200 of 700 W draws 860 W for a tick when work begins."""
    readings = [(ms, ms // 100 * 30.0 + (peak_j if ms >= 400 else 0.0)) for ms in range(0, 900, 5)]
    series = series_of(*readings, highest_w=LIMIT_W)
    reason = series.reason_between(310 * MS, 390 * MS)
    assert (reason is not None) == wrong
    assert reason is None or reason.startswith("nvml: the counter of gpu:GPU-a jumped by 120.000 J")
    assert series.reason_between(510 * MS, 590 * MS) is None
    assert series_of(*readings).outages == []


def test_a_device_that_falls_asleep_is_not_wrong() -> None:
    readings = [
        (ms, 10.0 * (ms // 100) if ms < 700 else 60.0 + 2.0 * (ms // 100 - 6)) for ms in range(0, 1500, 5)
    ]
    assert series_of(*readings).outages == []


@pytest.mark.parametrize("first_ms", [450, 550, 750])
def test_a_counter_that_loses_one_tick_is_noticed(first_ms: int) -> None:
    """It stands still for one tick of 100 ms, and the energy is gone."""
    shown_j, readings = 0.0, []
    for time_ms in range(0, 1500, 5):
        if time_ms % 100 == 0 and time_ms:
            shown_j += 0.0 if first_ms <= time_ms < first_ms + 100 else 30.0
        readings.append((time_ms, shown_j))
    lost_ms = -(-first_ms // 100) * 100
    stale_j = series_of(*readings).stale_j((lost_ms - 40) * MS, (lost_ms + 40) * MS)
    assert stale_j == pytest.approx(30.0, rel=0.1)


def test_naps_of_a_device_raise_no_alarm() -> None:
    """It draws 60 W, and 8 W for a tick now and then."""
    shown_j, readings = 0.0, []
    for time_ms in range(0, 4000, 5):
        if time_ms % 100 == 0 and time_ms:
            shown_j += 0.8 if time_ms % 700 == 0 else 6.0
        readings.append((time_ms, shown_j))
    assert series_of(*readings).outages == []


@dataclass(frozen=True)
class HastySensor(Sensor):
    """A sensor that ticks every ``hasty_ns`` in the window."""

    hasty_ns: int = 0

    def counter_j(self, time_ns: int) -> float:
        if not self._ticks:
            moment = EPOCH - 20 * S + self.phase_ns
            while moment < END + 20 * S:
                self._ticks.append((moment, self.wave.energy_j(moment)))
                moment += self.hasty_ns if START < moment < END else self.latch_ns
        return Sensor.counter_j(self, time_ns)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("idle_ms", "hasty_ms"), [(100, 50), (100, 20), (200, 60), (1000, 100)])
def test_a_counter_that_ticks_faster_under_load_is_not_taken_to_tick_as_before(
    idle_ms: int, hasty_ms: int, rounds: bool
) -> None:
    wave = Wave(((EPOCH - 20 * S, 80.0), (START, 300.0), (END, 80.0), (END + 20 * S, 80.0)))
    gap_ns = max(350 * MS, round(3.6 * idle_ms * MS))
    for seed in range(12):
        rng = Random(seed)
        sensor = HastySensor(wave, idle_ms * MS, phase_ns=rng.randrange(idle_ms * MS), hasty_ns=hasty_ms * MS)
        spells = [
            Spell(START - gap_ns, START, at_work=False),
            Spell(START, END, at_work=True, window=not rounds),
            Spell(END, END + gap_ns, at_work=False),
        ]
        meter_domain = domain(period_s=idle_ms / 1e3, highest_w=LIMIT_W)
        series = simulate_reader(
            [sensor], rng, START - gap_ns - 3 * S, END + gap_ns + S, meter_domain, spells[not rounds :]
        )
        gaps = (quiet_power(series, START - gap_ns, START), quiet_power(series, END, END + gap_ns))
        energy = energy_between(series, START, END, *(gaps if rounds else ()))
        energy = require_resolvable(energy, series, START, END)
        assert energy.energy_j is not None
        assert energy.u_j is not None
        assert abs(energy.energy_j - wave.joules(START, END)) <= 2 * energy.u_j
