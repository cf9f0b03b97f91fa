# SPDX-License-Identifier: Apache-2.0
"""Which meters are read at a wake-up, how closely, and when the next one is. It has no thread of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from pytest_llenergy.meters.follower import Follower
from pytest_llenergy.meters.protocol import Meter
from pytest_llenergy.meters.thrift import ALONE_NS, Thrift

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
