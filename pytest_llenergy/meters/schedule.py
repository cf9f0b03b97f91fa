# SPDX-License-Identifier: Apache-2.0
"""When the sampler reads each meter."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pytest_llenergy.meters.base import Meter
from pytest_llenergy.meters.trace import Series, Tick

# When to read next: shortly before a tick is due and then often, and hardly at all in between.
#
# How well a tick is known in time decides how well a window is known in joules, and reading costs CPU time
# that the workload might want. A counter that ticks every 100 ms needs four readings a tick, not a hundred.

#: Counters that tick faster than this are read evenly (seconds).
LEAST_PERIOD_S = 0.025

#: Closest distance of two readings (seconds).
STEP_S = 0.001

#: Ticks over which the deviation from the expected moment is averaged.
MEMORY = 16

#: Ticks from which a period that is not known is taken, before it is only adjusted.
FIRST_TICKS = 24

#: A tick is looked for from so many mean deviations before it is due, and at least so long (seconds). One
#: that came before that is known to a whole period only: that costs more than some readings too many.
MARGIN = 5.0
LEAST_MARGIN_S = 0.002

#: Readings in a margin.
STEPS = 3

#: A tick that is known no better than this many margins came before the first look. It counts as one that
#: was off by the second number of margins.
UNSEEN = 3.0
UNSEEN_DEVIATION = 2.0

#: Periods within which the next reading must come, so that hardly a tick is missed.
SEEING = 0.9

#: The same for a counter that moves all the time, while others are put off (seconds).
SEEING_ALWAYS_S = 0.05

#: Ticks are looked for over this part of a period at most, however long nobody looked closely.
WIDEST = 0.25

#: The part of a period that lies between two readings then.
SEARCHING = 1 / 32

#: The part of a period by which ticks may drift away from the timetable at each of them, seen or not.
DRIFT = 0.002

#: The part of a period by which the timetable may be off when it says nothing any more.
ANY_TIME = 0.5

#: Ticks that must have been seen closely before the timetable tells when others came.
KNOWN = 8

#: Share of the deviation of one tick by which the timetable is moved: a tick that jitters says little of the
#: next. One that is further off than so many margins says that the timetable is wrong.
FOLLOW = 0.25
LOST = 5.0

#: The same for the period, once it is known: a loop of second order that is critically damped.
FOLLOW_PERIOD = FOLLOW**2 / 4


class Pace:
    """The timetable of one meter, from the ticks of its domains (the first that ticks slowly leads)."""

    def __init__(self, series: Sequence[Series], poll_period_s: float) -> None:
        self._poll_ns = round(poll_period_s * 1e9)
        self._series = series
        # Integrated power does not move at moments of its own, but at those of the readings.
        slow = [each for each in series if each.domain.max_age_s is None and not each.domain.integrated]
        self._leader = slow[0] if len(slow) == len(series) and slow else None
        self._deviation_ns = 1e6
        self._expected_ns: float | None = None
        self._period_ns: float | None = None
        self._adjust = False
        self._followed = 1
        self._seen = 0
        self._doubt_ns = 0.0
        self._came = True

    @property
    def known(self) -> bool:
        """Whether nothing depends on seeing one tick after the other: all periods are known."""
        return all(
            each.domain.max_age_s is not None or each.domain.update_period_s is not None
            for each in self._series
        )

    @property
    def period_ns(self) -> float:
        """The time between two ticks, or two readings of a counter that moves all the time (ns)."""
        return self._period_ns or self._poll_ns

    @property
    def learning(self) -> bool:
        """Whether it is not known yet how regularly the counter ticks."""
        return self._leader is not None and self._expected_ns is not None and self._followed < KNOWN

    @property
    def longest_ns(self) -> float:
        """How long after a reading the next one must come at the latest (ns)."""
        if self._leader is None:
            return max(self._poll_ns, SEEING_ALWAYS_S * 1e9)
        return SEEING * self._period_ns if self._period_ns else self._poll_ns

    def narrowed(self, tick: Tick) -> Tick:
        """The tick within what the timetable allows, where the readings around it were put off.

        Only where the counter was seen closely before, so that it is known how regularly it ticks, and
        where both agree.
        """
        expected_ns, period_ns = self._expected_ns, self._period_ns
        if not self._doubt_ns or self.learning or expected_ns is None or period_ns is None:
            return tick
        # The tick that the next one is expected after.
        around_ns = self._doubt_ns + self._margin_ns
        earliest_ns = max(tick.earliest_ns, round(expected_ns - period_ns - around_ns))
        latest_ns = tick.latest_ns
        if self._came:
            latest_ns = min(latest_ns, round(expected_ns - period_ns + around_ns))
        if earliest_ns > latest_ns:
            return tick
        return tick._replace(earliest_ns=earliest_ns, latest_ns=latest_ns)

    def next_ns(self, now_ns: int, put_off: bool = False, sparing: bool = False) -> int:
        """The moment of the next reading, given that one has just been made (monotonic nanoseconds).

        With ``put_off`` it, or the one before, was made later than it should have been: that a tick came
        in between is then no fault of the timetable. ``sparing`` takes two readings a tick for four.
        """
        leader = self._leader
        if leader is None or not leader.ticks:
            return now_ns + self._poll_ns
        if len(leader.ticks) != self._seen:
            self._learn(leader, put_off)
        if self._expected_ns is None:
            return now_ns + self._poll_ns
        around_ns = self._around_ns
        early_ns = round(self._expected_ns - around_ns)
        if now_ns < early_ns:
            return early_ns
        if now_ns > self._expected_ns + 2 * around_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(self._step_ns(sparing), STEP_S * 1e9))

    def _step_ns(self, sparing: bool) -> float:
        """How far apart readings are while a tick is looked for."""
        if self._doubt_ns and self._period_ns:
            return min(self._margin_ns, SEARCHING * self._period_ns)
        return self._margin_ns if sparing else self._margin_ns / STEPS

    @property
    def _margin_ns(self) -> float:
        return max(MARGIN * self._deviation_ns, LEAST_MARGIN_S * 1e9)

    @property
    def _around_ns(self) -> float:
        """How far around the expected moment the tick is looked for."""
        if not self._period_ns:
            return self._margin_ns
        return max(self._margin_ns, min(self._doubt_ns, WIDEST * self._period_ns))

    def _learn(self, leader: Series, put_off: bool) -> None:
        tick, known_s = leader.ticks[-1], leader.domain.update_period_s
        self._adjust = known_s is not None or len(leader.ticks) > FIRST_TICKS
        if self._period_ns is None or not self._adjust:
            period_s = known_s or leader.tick_period_s
            self._period_ns = None if period_s is None else period_s * 1e9
        in_turn = len(leader.ticks) == self._seen + 1
        self._seen = len(leader.ticks)
        if self._period_ns is None or self._period_ns < LEAST_PERIOD_S * 1e9:
            self._expected_ns = None
        elif self._expected_ns is None or not in_turn:
            self._expected_ns = tick.time_ns + self._period_ns
            # The next one may be as far off as this one is not known.
            self._deviation_ns, self._followed = max(self._deviation_ns, tick.gap_s * 1e9 / MARGIN), 1
        else:
            self._expected_ns = self._follow(tick, self._expected_ns, self._period_ns, put_off)

    def _follow(self, tick: Tick, expected_ns: float, period_ns: float, put_off: bool) -> float:
        """When the next tick is due, by this one and by when it was expected."""
        if self._doubt_ns or put_off:
            return self._find(tick, expected_ns, period_ns, put_off)
        unseen = tick.latest_ns - tick.earliest_ns > UNSEEN * self._margin_ns
        # Ticks that nobody saw one by one may lie between; what was read is what the last of them left.
        missed = (tick.latest_ns - expected_ns) / period_ns
        expected_ns += (math.floor(missed) if unseen else round(missed)) * period_ns
        # Where it came before the first look, the middle of all that time says nothing of when.
        moment_ns = min(max(expected_ns, tick.earliest_ns), tick.latest_ns) if unseen else tick.time_ns
        error_ns = moment_ns - expected_ns
        lost = abs(error_ns) > LOST * self._margin_ns
        # Within the readings around a tick nothing says when it came, so nothing that it was off.
        apart_ns = max(0.0, abs(error_ns) - tick.gap_s * 1e9 / 4)
        deviation_ns = UNSEEN_DEVIATION * self._margin_ns if unseen else apart_ns
        self._followed = min(self._followed + 1, MEMORY)
        self._deviation_ns += (deviation_ns - self._deviation_ns) / self._followed
        if self._adjust and not lost:
            self._period_ns = period_ns + FOLLOW_PERIOD * error_ns
        return expected_ns + (1 if lost else FOLLOW) * error_ns + period_ns

    def _find(self, tick: Tick, expected_ns: float, period_ns: float, put_off: bool) -> float:
        """The same for a tick of which the readings around it were put off, and for those after it.

        Each only bounds when the next one comes, but all together do so closely.
        """
        if not put_off and tick.latest_ns - tick.earliest_ns <= 2 * SEARCHING * period_ns:
            # The first that was seen again. How far off it was says nothing of how ticks jitter.
            self._doubt_ns = 0.0
            if self._followed == 1:
                # Nothing had been learned before, and what was assumed came from readings that were put off.
                self._deviation_ns = tick.gap_s * 1e9 / MARGIN
            return tick.time_ns + period_ns
        margin_ns = min(self._margin_ns, SEARCHING * period_ns)
        around_ns = (self._doubt_ns or margin_ns) + DRIFT * period_ns
        self._came = True
        if tick.latest_ns - tick.earliest_ns > period_ns:
            return self._count(tick, expected_ns, period_ns, around_ns)
        expected_ns += math.floor((tick.latest_ns + around_ns - expected_ns) / period_ns) * period_ns
        earliest_ns = max(expected_ns - around_ns, tick.earliest_ns - margin_ns)
        latest_ns = min(expected_ns + around_ns, tick.latest_ns + margin_ns)
        if earliest_ns > latest_ns:
            earliest_ns, latest_ns = tick.earliest_ns, tick.latest_ns
        self._doubt_ns = (latest_ns - earliest_ns) / 2
        return (earliest_ns + latest_ns) / 2 + period_ns

    def _count(self, tick: Tick, expected_ns: float, period_ns: float, around_ns: float) -> float:
        """The same where several ticks may have come unseen: only the timetable tells when the last did."""
        unseen = max(0.0, (tick.latest_ns - expected_ns) / period_ns)
        around_ns = min(around_ns + DRIFT * unseen * period_ns, ANY_TIME * period_ns)
        self._doubt_ns = around_ns
        reach_ns = around_ns + self._margin_ns
        expected_ns += math.floor((tick.latest_ns + reach_ns - expected_ns) / period_ns) * period_ns
        # Where it was due at just that time, the reading may be of the one before it.
        self._came = expected_ns + reach_ns < tick.latest_ns
        return expected_ns + period_ns if self._came else expected_ns


# How often the background reader may run: what it takes, the workload has not.
#
# On a slow machine a single reading takes more than a tenth of a millisecond, most of it to wake up. Where
# several boards tick in their own time, all of them cannot be read closely at every tick for a hundredth of
# a core. Close readings are therefore kept for where they matter: the quiet gaps of a round, and the ticks
# after a window has ended. Elsewhere readings are put off until they can be paid for, and then made for all
# boards that are due: the time of a tick is known less well there, and says so.
#
# A loop in the same process loses most: each call of a driver hands the interpreter's lock over and back.
# Ticks in the middle of its windows are therefore left unseen, since counters go on unread. Those after an
# edge are seen, and paid for later.

#: Share of a core that the reader takes at most, on average.
SHARE = 0.01

#: The same while a window is open or a round is at work.
SHARE_AT_WORK = 0.0025

#: What a thread loses that must hand over the interpreter's lock and get it back (ns). An estimate, not a
#: measurement: a loop in a virtual machine lost 0.8 % (give or take 0.5 %) to some 51 wake-ups a second, of
#: two hand-overs each.
HANDOVER_NS = 75_000

#: CPU time that may be saved up and spent at once (ns): the tick of each of eight boards, and of one.
CREDIT_NS = 5_000_000
CREDIT_AT_WORK_NS = 300_000

#: Debt that is paid back there, and not forgotten (ns): of the readings of four ticks of eight boards.
DEBT_BESIDE_NS = 5_000_000

#: How long all meters may be left alone there (ns). A counter that breaks is to be found out.
ALONE_NS = 1_000_000_000

#: Wake-ups in a row that waited for the lock of a busy process. A single one was perhaps only late.
BESIDE_WAKES = 2


class Thrift:
    """Says when the reader may run next. All times are in nanoseconds."""

    def __init__(self, *, always_closely: bool = False) -> None:
        self._lock = threading.Lock()
        self._always_closely = always_closely
        self._close = 0
        self._at_work = 0
        self._beside_wakes = 0
        #: How often work has begun or ended.
        self.edges: int = 0
        self._credit_ns = 0.0
        self._credit_at_work_ns: float = CREDIT_AT_WORK_NS

    @contextmanager
    def closely(self) -> Iterator[None]:
        """Read as closely as the timetable wants, unless something is at work beside it."""
        with self._lock:
            self._close += 1
        try:
            yield
        finally:
            with self._lock:
                self._close -= 1

    def work_begins(self) -> None:
        """Something is measured, until ``work_ends`` was called as often."""
        with self._lock:
            self._at_work += 1
            self.edges += 1

    def work_ends(self) -> None:
        """See ``work_begins``."""
        with self._lock:
            self._at_work -= 1
            self.edges += 1

    def border(self) -> None:
        """Within the work, one thing that is measured ends and another begins."""
        with self._lock:
            self.edges += 1

    @property
    def sparing(self) -> bool:
        """Whether something is at work."""
        return bool(self._at_work) and not self._close and not self._always_closely

    @property
    def _free(self) -> bool:
        return self._always_closely or (bool(self._close) and not self._at_work)

    @property
    def recovered(self) -> bool:
        """Whether enough was saved at work to go by the timetable again."""
        return self._credit_at_work_ns >= CREDIT_AT_WORK_NS / 2

    @property
    def beside(self) -> bool:
        """Whether what is at work is a loop in this process, which hands its lock over for each reading."""
        return self.sparing and self._beside_wakes >= BESIDE_WAKES

    def pay(self, cost_ns: int, elapsed_ns: int, handovers: int = 0, *, busy: bool = False) -> None:
        """Note the CPU time of one wake-up, and the time since the one before.

        ``handovers`` is how often it took the interpreter's lock from the work beside it; ``busy`` tells that
        this work is in the same process.
        """
        self._beside_wakes = self._beside_wakes + 1 if busy and handovers else 0
        if self._free:
            return
        credit_ns = self._credit_ns + SHARE * elapsed_ns - cost_ns
        self._credit_ns = max(-CREDIT_NS, min(credit_ns, CREDIT_NS))
        if not self._at_work:
            self._credit_at_work_ns = CREDIT_AT_WORK_NS
            return
        taken_ns = cost_ns + handovers * HANDOVER_NS
        at_work_ns = self._credit_at_work_ns + SHARE_AT_WORK * elapsed_ns - taken_ns
        most_ns = DEBT_BESIDE_NS if self.beside else CREDIT_AT_WORK_NS
        self._credit_at_work_ns = max(-most_ns, min(at_work_ns, CREDIT_AT_WORK_NS))

    def wait_ns(self, longest_ns: float) -> int:
        """How long the next wake-up must be put off, but never for longer than ``longest_ns``."""
        if self._free:
            return 0
        wait_ns = max(0.0, -self._credit_ns / SHARE)
        if self.sparing:
            wait_ns = max(wait_ns, -self._credit_at_work_ns / SHARE_AT_WORK)
        return round(min(wait_ns, longest_ns))


# Follows one meter: asks it, takes down what it says, and knows when to ask again.

#: A reading that comes later than this after it was due is noted (nanoseconds).
LATE_NS = 50_000_000

#: Power that was not read for so long (nanoseconds), or for so many of its periods if that is longer, is not
#: known, and no reading makes up for it.
UNREAD_NS, UNREAD_PERIODS = 80_000_000, 1.5

#: Readings that are kept before they are looked at, even while the work goes on.
MOST_NOTED = 256


class Answer(NamedTuple):
    """What a meter said between two moments."""

    begin_ns: int
    end_ns: int
    values: Sequence[object]


class Follower:
    """One open meter: what it said, and when it is due again."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.meter = meter
        self._clock = clock
        self.series: list[Series] = [Series(meter.name, domain) for domain in meter.domains]
        self.pace: Pace = Pace(self.series, meter.poll_period_s)
        self.due_ns: int = 0
        self.asked_ns: int | None = None
        self.always_fresh: bool = all(each.domain.max_age_s is not None for each in self.series)
        self._put_off = False
        self.noted: list[tuple[int, Answer]] = []

    def read(self, put_off_to_ns: int = 0, sparing: bool = False) -> None:
        """Read once. It was not to be read before ``put_off_to_ns``, though it may have been due."""
        answer = self._ask()
        self.catch_up()
        self._take(answer, put_off_to_ns, sparing)

    def note(self, planned_ns: int) -> None:
        """Read once, as was planned, and work out later what it says: that costs more than to ask."""
        self.noted.append((planned_ns, self._ask()))
        if len(self.noted) >= MOST_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Work out what was noted."""
        noted, self.noted = self.noted, []
        for planned_ns, answer in noted:
            self._take(answer, planned_ns, sparing=True)

    def _ask(self) -> Answer:
        begin_ns = self.asked_ns = self._clock()
        values: Sequence[object]
        try:
            values = self.meter.read()
        except Exception as error:
            # Meters come from third parties too; one that breaks must not end the reading of the rest.
            values = [f"{self.meter.name}: {type(error).__name__}: {error}"] * len(self.series)
        self.asked_ns = None
        return Answer(begin_ns, self._clock(), values)

    def _take(self, answer: Answer, put_off_to_ns: int, sparing: bool) -> None:
        put_off, self._put_off = self._put_off, put_off_to_ns > self.due_ns
        due_ns = max(self.due_ns or answer.begin_ns, put_off_to_ns)
        for series, value in zip(self.series, self._checked(answer.values), strict=True):
            # Either nobody came to read, or the answer took that long.
            if answer.end_ns - due_ns > LATE_NS:
                series.late.append((due_ns, answer.end_ns))
                if series.domain.integrated and answer.end_ns - due_ns > _longest_unread_ns(series):
                    told = f"the power of {series.domain.name} was not read for"
                    series.miss(
                        due_ns, answer.end_ns, f"{self.meter.name}: {told} {_ms(answer.end_ns - due_ns)}"
                    )
            if isinstance(value, str):
                series.fail(answer.begin_ns, value)
            else:
                series.add(answer.begin_ns, answer.end_ns, value)
        self.due_ns = self.pace.next_ns(answer.end_ns, put_off or self._put_off, sparing)
        self._narrow()

    def _narrow(self) -> None:
        """Where readings were put off, the timetable knows better than they do when a counter ticked."""
        if len(self.series) == 1 and self.series[0].ticks:
            ticks = self.series[0].ticks
            ticks[-1] = self.pace.narrowed(ticks[-1])

    def _checked(self, values: Sequence[object]) -> list[float | str]:
        if not isinstance(values, Sequence) or len(values) != len(self.series):
            told = len(values) if isinstance(values, Sequence) else repr(values)
            reason = f"{self.meter.name}: it read {told} values for {len(self.series)} domains"
            return [reason] * len(self.series)
        return [_checked(self.meter, value) for value in values]


def _longest_unread_ns(series: Series) -> float:
    return max(UNREAD_NS, UNREAD_PERIODS * (series.domain.update_period_s or 0.0) * 1e9)


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.0f} ms"


def _checked(meter: Meter, value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return f"{meter.name}: it read {value!r}, which is no number of joules"


# Which meters are read at a wake-up, how closely, and when the next one is. It has no thread of its own.

#: Meters due within this time of one another are read in one go (nanoseconds).
TOGETHER_NS = 300_000

#: How long, at most, is spent on learning how counters tick (nanoseconds).
LEARNING_NS = 2_000_000_000

#: Share of a core that the rest of this process uses when the work is there. It gets little on a full host.
BUSY = 0.1

#: Periods of the slowest counter after an edge in which hardly a tick is left unseen: the joules at the edge
#: come from the two ticks after it.
EDGE_PERIODS = 2.5


class Reader:
    """Open meters, each with its timetable, and what all of them together may cost.

    ``clock`` gives monotonic nanoseconds, ``spent`` the CPU time of whoever calls ``turn``, ``used`` that of
    the whole process.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        clock: Callable[[], int] = time.monotonic_ns,
        spent: Callable[[], int] = time.thread_time_ns,
        used: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._clock, self._spent, self._used = clock, spent, used
        self.followers: list[Follower] = [Follower(meter, clock) for meter in meters]
        # Power readings are joined as they come: what is read late is taken for power at another time.
        self.thrift: Thrift = Thrift(
            always_closely=any(domain.integrated for meter in meters for domain in meter.domains)
        )
        self._noting = False
        self._put_off_to_ns = 0
        #: Whether ticks are left unseen on purpose at present.
        self.asleep: bool = False
        self._edges = 0
        self._edge_ns = 0

    def begin(self) -> None:
        """Read each meter for the first time."""
        for each in self.followers:
            each.read()
        self.start_ns: int = self._clock()

    def wake(self) -> None:
        """The first wake-up of the thread that calls ``turn`` from now on."""
        self._woken_ns = self._planned_ns = self._clock()
        self._spent_ns, self._used_ns = self._spent(), self._used()

    def turn(self) -> int:
        """Read what is due. Returns when to wake up again."""
        now_ns, sparing = self._clock(), self.thrift.sparing
        if self._edges != self.thrift.edges:
            self._edges, self._edge_ns = self.thrift.edges, now_ns
        # Where readings are put off, they are made together: to wake up costs most. At work they are then
        # rare and only noted, until the timetable can be paid for again.
        put_off = self._put_off_to_ns > self._woken_ns
        if self._noting:
            self._put_off_to_ns = max(self._put_off_to_ns, self._planned_ns)
        self._noting = sparing and (put_off or (self._noting and not self.thrift.recovered))
        until_ns = now_ns + (self._longest_ns if self._noting or put_off else TOGETHER_NS)
        due = [each for each in self.followers if each.due_ns <= until_ns]
        for each in due:
            if self._noting:
                each.note(self._planned_ns)
            else:
                each.read(self._put_off_to_ns, sparing)
        return self._plan(now_ns, len(due))

    def catch_up(self) -> None:
        """Work out what was only noted."""
        for each in self.followers:
            each.catch_up()

    @property
    def has_noted(self) -> bool:
        """Whether there is anything to catch up on."""
        return any(each.noted for each in self.followers)

    def _plan(self, now_ns: int, readings: int) -> int:
        spent_before_ns, self._spent_ns = self._spent_ns, self._spent()
        used_before_ns, self._used_ns = self._used_ns, self._used()
        cost_ns, elapsed_ns = self._spent_ns - spent_before_ns, now_ns - self._woken_ns
        busy = self._used_ns - used_before_ns - cost_ns > BUSY * elapsed_ns
        # So long it waits for the lock of a busy interpreter, to wake up and after each call.
        waited_ns = self._clock() - self._planned_ns - cost_ns
        handovers = max(0, min(round(waited_ns / 1e9 / sys.getswitchinterval()), 1 + readings))
        if busy and handovers:
            # Who gets the lock back at once has made the other thread try to take it all the same.
            handovers = 1 + readings
        self.thrift.pay(cost_ns, elapsed_ns, handovers, busy=busy)
        self._woken_ns = now_ns
        wait_ns = 0 if self._learning(now_ns) else self.thrift.wait_ns(self._alone_ns(now_ns))
        self.asleep = wait_ns > self._longest_ns
        self._put_off_to_ns = now_ns + wait_ns
        first_ns = min(each.due_ns for each in self.followers)
        due_ns = now_ns + self._longest_ns if self._noting else first_ns
        self._planned_ns = max(self._put_off_to_ns, round(due_ns))
        return self._planned_ns

    def _learning(self, now_ns: int) -> bool:
        """Whether ticks are looked at closely for a start, so that less will do later."""
        early = now_ns - self.start_ns < LEARNING_NS
        return early and not self.thrift.sparing and any(each.pace.learning for each in self.followers)

    def _alone_ns(self, now_ns: int) -> float:
        """How long all meters may be left alone at present."""
        if not self.thrift.beside or not all(each.pace.known for each in self.followers):
            return self._longest_ns
        # One that came in the middle of the readings is noted when they are next made.
        near_edge = (
            now_ns - self._edge_ns < EDGE_PERIODS * self._slowest_ns or self._edges != self.thrift.edges
        )
        return self._longest_ns if near_edge else max(self._longest_ns, ALONE_NS)

    @property
    def _longest_ns(self) -> float:
        """How long all meters may be left alone, so that hardly a tick is missed."""
        return min(each.pace.longest_ns for each in self.followers)

    @property
    def _slowest_ns(self) -> float:
        """The longest period of a counter."""
        return max(each.pace.period_ns for each in self.followers)
