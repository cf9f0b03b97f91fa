# SPDX-License-Identifier: Apache-2.0
"""The background reader: its wake-ups on a simulated clock, and its thread on the real one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.meters.base import Domain, within
from pytest_llenergy.energy.sampler import UNOBSERVED_NS, Sampler
from pytest_llenergy.energy.schedule import DISTURBED_NS, SHARE_AT_WORK
from pytest_llenergy.energy.trace import Series

from .watching import READ_NS, WAKE_NS, Spell, simulate_reader
from .waves import EPOCH, MS, S, Sensor, Wave, domain

pytestmark = pytest.mark.clock

TICK = 100 * MS
BEGIN = EPOCH + 3 * S
WAVE = Wave(((EPOCH - S, 100.0), (BEGIN, 400.0), (EPOCH + 100 * S, 400.0)))

#: Cost of a wake-up that reads eight boards, to a loop in the same process (nanoseconds).
WAKE_COST_NS = 1.5 * WAKE_NS + 8 * READ_NS + DISTURBED_NS


def simulate_work(
    works: Sequence[tuple[int, int]], held: bool, boards: int = 8, period_s: float | None = 0.1
) -> tuple[Series, list[int]]:
    """Simulate a reader with ``works`` (start, end) and return the first board's series and the wake-ups."""
    sensors = [Sensor(WAVE, TICK, phase_ns=index * TICK // boards) for index in range(boards)]
    spells = [Spell(begin_ns, end_ns, at_work=True) for begin_ns, end_ns in works]
    begin_ns, end_ns = min(begin_ns for begin_ns, _ in works), max(end_ns for _, end_ns in works)
    moments: list[int] = []
    holding_ns = (begin_ns, end_ns) if held else (0, 0)
    meter_domain = domain(period_s=period_s)
    series = simulate_reader(sensors, Random(1), EPOCH, end_ns + S, meter_domain, spells, holding_ns, moments)
    return series, [moment for moment in moments if begin_ns < moment < end_ns]


def longest_gap_ns(moments: Sequence[int]) -> int:
    return max(later - earlier for earlier, later in pairwise(moments))


class TestWakeUps:
    def test_wake_ups_during_a_busy_loop_stay_within_their_share(self) -> None:
        _, moments = simulate_work([(BEGIN, BEGIN + 30 * S)], held=True)
        assert len(moments) * WAKE_COST_NS / (30 * S) == pytest.approx(SHARE_AT_WORK, rel=0.2)

    @pytest.mark.parametrize("boards", [1, 8])
    def test_learning_takes_little_from_a_busy_loop(self, boards: int) -> None:
        work = (EPOCH, EPOCH + 3 * S)
        _, moments = simulate_work([work], held=True, boards=boards)
        assert len(moments) <= 7 * 3
        _, moments = simulate_work([work], held=False, boards=boards)
        assert len(moments) > 10 * 3

    def test_without_lock_handovers_hardly_a_tick_is_missed(self) -> None:
        series, moments = simulate_work([(BEGIN, BEGIN + 30 * S)], held=False)
        assert len(moments) >= 300
        assert len(series.ticks_between(BEGIN, BEGIN + 30 * S)) >= 290

    def test_ticks_after_an_edge_are_read_and_paid_for_later(self) -> None:
        series, moments = simulate_work([(BEGIN, BEGIN + 10 * S)], held=True)
        assert len([moment for moment in moments if moment < BEGIN + 450 * MS]) >= 3
        assert len(series.ticks_between(BEGIN, BEGIN + 450 * MS)) >= 2
        assert longest_gap_ns(moments) > 4 * TICK

    def test_counters_are_read_often_enough_to_notice_a_failure_within_a_second(self) -> None:
        _, moments = simulate_work([(BEGIN, BEGIN + 30 * S)], held=True)
        # A wake-up hands over the lock nine times and may come late.
        assert longest_gap_ns(moments) < UNOBSERVED_NS + 100 * MS

    def test_edges_of_nested_work_are_read_closely(self) -> None:
        inner = BEGIN + 10 * S
        _, moments = simulate_work([(BEGIN, BEGIN + 20 * S), (inner, inner + 2 * S)], held=True)
        for edge_ns in (inner, inner + 2 * S):
            after = [moment for moment in moments if edge_ns <= moment < edge_ns + 450 * MS]
            assert after[0] < edge_ns + 60 * MS
            assert len(after) >= 3

    def test_a_counter_of_unknown_period_is_read_at_every_tick(self) -> None:
        _, moments = simulate_work([(BEGIN, BEGIN + 20 * S)], held=True, period_s=None)
        assert longest_gap_ns(moments) < 2 * TICK

    @pytest.mark.parametrize("held", [True, False])
    @pytest.mark.parametrize("length_s", [0.5, 1, 3, 20])
    def test_ticks_skipped_on_purpose_are_not_flagged(self, length_s: float, held: bool) -> None:
        end_ns = BEGIN + round(length_s * S)
        series, _ = simulate_work([(BEGIN, end_ns)], held)
        assert series.late == []
        assert trace_flags([series], BEGIN, end_ns) == []


DOMAIN = Domain(
    name="cpu:x",
    kind="measured",
    source="test",
    scope="test",
    update_period_s=None,
    resolution_j=1e-6,
    accuracy="exact",
    limits=within(0),
)


@dataclass
class Counting:
    """Returns the number of its readings as joules; from reading ``fails_from`` on it gives a reason."""

    poll_period_s: float
    fails_from: int = 1_000_000
    name: str = "counting"
    domains: tuple[Domain, ...] = (DOMAIN,)
    readings: int = 0
    closed: int = 0
    threads: set[str] = field(default_factory=set)

    def read(self) -> list[float | str]:
        self.readings += 1
        self.threads.add(threading.current_thread().name)
        return [float(self.readings) if self.readings < self.fails_from else "counting: gone"]

    def close(self) -> None:
        self.closed += 1


def test_meters_are_read_at_their_poll_periods_and_closed() -> None:
    fast, slow = Counting(0.01), Counting(100.0)
    with Sampler([fast, slow]) as sampler:
        deadline = time.monotonic() + 60
        while fast.readings < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert slow.readings == 1  # The reading on entry.
        assert fast.readings >= 8
    assert (fast.closed, slow.closed) == (1, 1)
    assert not any(thread.name == "llenergy-sampler" for thread in threading.enumerate())
    readings = fast.readings
    time.sleep(0.05)
    assert fast.readings == readings
    assert [tick.energy_j for tick in sampler.series[0].ticks] == [float(i) for i in range(2, readings + 1)]


def test_read_now_reads_in_the_calling_thread() -> None:
    meter = Counting(10.0, domains=(DOMAIN._replace(max_age_s=0.001),))
    with Sampler([meter]) as sampler:
        before_ns = time.monotonic_ns()
        sampler.read_now()
        after_ns = time.monotonic_ns()
        assert meter.readings == 2
        assert before_ns <= sampler.series[0].ticks[-1].latest_ns <= after_ns
    assert meter.threads == {"MainThread"}


def test_read_now_of_a_meter_that_was_put_off_on_purpose_is_not_late() -> None:
    meter = Counting(10.0, domains=(DOMAIN._replace(max_age_s=0.001),))
    with Sampler([meter]) as sampler:
        (reader,) = sampler._reader.meters
        reader.due_ns = time.monotonic_ns() - S
        sampler._reader.put_off_to_ns = time.monotonic_ns() + S
        sampler.read_now()
        assert sampler.series[0].late == []


def test_read_now_skips_counters_that_move_in_ticks() -> None:
    meter = Counting(10.0)
    with Sampler([meter]) as sampler:
        sampler.read_now()
        assert meter.readings == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([None], "counting: TypeError: float() argument must be a string or a real number, not 'NoneType'"),
        ([math.nan], "counting: it read nan, which is not a number of joules"),
        ([math.inf], "counting: it read inf, which is not a number of joules"),
        ([1.0, 2.0], "counting: it read 2 values for 1 domains"),
        ([], "counting: it read 0 values for 1 domains"),
    ],
)
def test_an_invalid_reading_gives_a_reason(given: list[Any], reason: str) -> None:
    odd = InvalidReadings(0.01, given=given)
    with Sampler([odd]) as sampler:
        time.sleep(0.05)
    assert sampler.series[0].reason == reason
    assert odd.closed == 1


def test_a_counter_that_stands_still_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    still = Still(0.01)
    with Sampler([still]) as sampler:
        sampler.await_ticks(0, 0.2)
        slept_s: list[float] = []
        sleep = time.sleep

        def note(seconds: float) -> None:
            if threading.current_thread() is threading.main_thread():
                slept_s.append(seconds)
            sleep(seconds)

        monkeypatch.setattr("pytest_llenergy.real_time.sleep", note)
        for _ in range(20):
            sampler.await_ticks(time.monotonic_ns(), 0.2)
    assert slept_s == []


def test_a_reader_that_was_blocked_records_the_gap() -> None:
    meter, blocking = Counting(0.01), Blocking(0.01)
    with Sampler([meter, blocking]) as sampler:
        deadline = time.monotonic() + 60
        while not blocking.blocked and time.monotonic() < deadline:
            time.sleep(0.01)
        readings = meter.readings
        while meter.readings == readings and time.monotonic() < deadline:
            time.sleep(0.01)
    begin_ns, end_ns = blocking.blocked_ns
    gaps = [(begin, end) for begin, end in sampler.series[0].late if begin < end_ns and end > begin_ns]
    assert gaps, sampler.series[0].late
    # It was due soon after the call began, and was read soon after it ended.
    assert gaps[0][0] <= begin_ns + 100 * MS
    assert gaps[-1][1] >= end_ns


def test_a_reason_is_kept_and_reading_continues() -> None:
    meter = Counting(0.01, fails_from=3)
    with Sampler([meter]) as sampler:
        deadline = time.monotonic() + 60
        while meter.readings < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sampler.series[0].reason == "counting: gone"
    assert [tick.energy_j for tick in sampler.series[0].ticks] == [2.0]


def test_a_costly_meter_is_read_rarely_during_work_and_keeps_every_reading() -> None:
    meter = Costly(0.01, domains=(DOMAIN._replace(update_period_s=0.1),))
    with Sampler([meter]) as sampler:
        time.sleep(0.3)
        with sampler.at_work():
            before, begin_s = meter.readings, time.monotonic()
            time.sleep(1.5)
            at_work, work_s = meter.readings - before, time.monotonic() - begin_s
        with sampler.reading_closely():
            for _ in range(10):
                before, begin_s = meter.readings, time.monotonic()
                time.sleep(0.5)
                closely, close_s = meter.readings - before, time.monotonic() - begin_s
                if closely / close_s > at_work / work_s:
                    break
                # Again if the machine kept the reader from running.
    assert at_work <= 3 + work_s / 0.09  # One reading in 90 ms, so that no tick is missed.
    assert closely / close_s > at_work / work_s
    assert [tick.energy_j for tick in sampler.series[0].ticks] == [
        float(index) for index in range(2, meter.readings + 1)
    ]


def test_ticks_after_work_are_waited_for() -> None:
    meter = Costly(0.01, domains=(DOMAIN._replace(update_period_s=0.02),))
    with Sampler([meter]) as sampler:
        time.sleep(0.1)
        with sampler.at_work():
            time.sleep(1.5)
            end_ns = time.monotonic_ns()
        sampler.await_ticks(end_ns, 0.2, ticks=2)
        assert sampler.series[0].has_ticked_after(end_ns, 2)


def test_power_that_was_not_read_in_time_is_an_outage() -> None:
    power = DOMAIN._replace(update_period_s=0.1, integrated=True)
    meter, blocking = Counting(0.01, domains=(power,)), Blocking(0.01)
    with Sampler([meter, blocking]) as sampler:
        deadline = time.monotonic() + 60
        while not blocking.blocked and time.monotonic() < deadline:
            time.sleep(0.01)
        readings = meter.readings
        while meter.readings == readings and time.monotonic() < deadline:
            time.sleep(0.01)
    # On a busy machine there may be others.
    _, end_ns = blocking.blocked_ns
    (outage,) = (each for each in sampler.series[0].outages if each.start_ns < end_ns <= each.end_ns)
    assert outage.reason.startswith("counting: the power of cpu:x was not read for ")


def test_power_readings_are_never_postponed() -> None:
    power = DOMAIN._replace(update_period_s=0.1, integrated=True)
    meter, other = Costly(0.01, domains=(power,)), Counting(0.01, domains=(DOMAIN,))
    with Sampler([meter, other]) as sampler:
        time.sleep(0.3)
        with sampler.at_work():
            before = meter.readings
            time.sleep(2.0)
            at_work = meter.readings - before
    # Two to four around each of twenty ticks; postponed, it would be one in 90 ms.
    assert at_work >= 26
    assert len(sampler.series[0].ticks) == meter.readings - 1


@dataclass
class InvalidReadings(Counting):
    """Returns invalid readings."""

    given: list[Any] = field(default_factory=list)

    def read(self) -> list[float | str]:
        return self.given


class Still(Counting):
    """A counter that never moves."""

    def read(self) -> list[float | str]:
        self.readings += 1
        return [5.0]


class Blocking(Counting):
    """A meter whose third reading takes 300 ms."""

    blocked = False
    blocked_ns = (0, 0)

    def read(self) -> list[float | str]:
        if self.readings == 2:
            begin_ns = time.monotonic_ns()
            time.sleep(0.3)
            self.blocked_ns = (begin_ns, time.monotonic_ns())
            self.blocked = True
        return super().read()


class Breaking(Counting):
    """A third-party meter that raises instead of giving a reason."""

    def read(self) -> list[float | str]:
        if self.readings > 1:
            raise KeyError("no such register")
        return super().read()


def test_a_meter_that_raises_gives_a_reason_and_others_are_still_read() -> None:
    breaking, fine = Breaking(0.01), Counting(0.01)
    with Sampler([breaking, fine]) as sampler:
        deadline = time.monotonic() + 60
        while fine.readings < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
    broken, whole = sampler.series
    assert broken.reason == "counting: KeyError: 'no such register'"
    assert whole.reason is None
    assert fine.readings >= 8


@dataclass
class Costly(Counting):
    """Uses two milliseconds of CPU time for each reading, and moves at each."""

    def read(self) -> list[float | str]:
        end_ns = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < end_ns:
            pass
        return super().read()
