# SPDX-License-Identifier: Apache-2.0
"""Progress lines of a comparison: signs of life of a running session, and one line for each pair."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TextIO

from pytest_llenergy.ab.schedule import Schedule
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests, one_line

#: A line in which a session tells what it waits for, such as devices, and who holds them (``progress``).
WAIT = re.compile(r"^energy: (?P<wait>(?P<key>.+) \(.+ so far\))$")

#: Time before the first sign of life of a session: the first of a side, which may load models, and others.
FIRST_SIGN_S, LATER_SIGN_S = 10.0, 60.0
#: Each further one comes after as much time again, at most this.
MAX_SILENCE_S = 300.0

#: Longest time between two lines of a session that waits.
WAIT_ENDED_S = 45.0

#: Characters of a line of the log that are shown.
MAX_LOG_LINE = 100

#: Sessions whose times predict those to come.
RECENT = 4


class SessionWatch:
    """Says what a session waits for, at once and then ever more rarely, and that it still runs.

    Args:
        printed: The log of the session, open for reading.
        say: Receives the lines.
        name: Name of the session.
        first_s: Time before the first sign of life.
    """

    def __init__(self, printed: TextIO, say: Callable[[str], None], name: str, first_s: float) -> None:
        self._printed = printed
        self._say = say
        self._name = name
        self._started_s = time.monotonic()
        self._next_s = first_s
        self._wait = ""
        self._last = ""
        self._waited_s = -WAIT_ENDED_S

    def poll(self) -> None:
        """Read what the session has printed since the last call."""
        elapsed_s = time.monotonic() - self._started_s
        while True:
            position = self._printed.tell()
            line = self._printed.readline()
            if not line.endswith("\n"):
                # An unfinished line is read again next time.
                self._printed.seek(position)
                self._note(line)
                break
            found = WAIT.match(line.rstrip())
            if found is None:
                self._note(line)
                continue
            self._waited_s = elapsed_s
            if found["key"] != self._wait or elapsed_s >= self._next_s:
                self._wait = found["key"]
                self._say(f"  waiting: {found['wait']}")
                self._postpone(elapsed_s)
        if elapsed_s >= self._next_s and elapsed_s >= self._waited_s + WAIT_ENDED_S:
            last = f": {self._last[:MAX_LOG_LINE]}" if self._last else ""
            self._say(f"  {self._name} runs, {format_minutes(elapsed_s)} so far{last}")
            self._postpone(elapsed_s)

    def _note(self, line: str) -> None:
        # A progress bar draws its line again and again.
        self._last = one_line(line.rstrip().rpartition("\r")[2]).strip() or self._last

    def _postpone(self, elapsed_s: float) -> None:
        self._next_s = max(self._next_s, elapsed_s + min(elapsed_s, MAX_SILENCE_S))


class RemainingTime:
    """Predicts how long pairs of sessions take: the time of the tests that they still have, and the rest."""

    def __init__(self) -> None:
        self._rest_s: list[float] = []
        self._tests_s: dict[str, list[float]] = {}

    def add(self, duration_s: float, records: Mapping[str, Record]) -> None:
        """Add a session with the records of its tests, by their common names."""
        spent_s = 0.0
        for name, record in records.items():
            times = record.times
            test_s = 0.0 if times is None else times.load_s + times.warmup_s + times.rounds_s + times.gaps_s
            self._tests_s.setdefault(name, []).append(test_s)
            spent_s += test_s
        self._rest_s.append(max(0.0, duration_s - spent_s))

    def predict_s(self, pairs: int, names: Iterable[str]) -> float:
        """Return how long pairs of sessions take with these tests."""
        # The first session of all may load models that later ones find.
        rest_s = median((self._rest_s[1:] or self._rest_s)[-RECENT:])
        tests_s = sum(median(self._tests_s[name][-RECENT:]) for name in names if name in self._tests_s)
        return 2 * pairs * (rest_s + tests_s)


def describe_plan(schedule: Schedule) -> str:
    """Describe how much is measured: ``6+6 pairs of rounds: 6 to 12 pairs of sessions, as tests need``."""
    first, most = schedule.pairs[0], sum(schedule.pairs)
    if first == most:
        return f"{schedule.stages} pairs of rounds: {most} pair{'' if most == 1 else 's'} of sessions"
    return f"{schedule.stages} pairs of rounds: {first} to {most} pairs of sessions, as tests need"


def describe_pair(
    pair: int,
    stage: int,
    schedule: Schedule,
    durations_s: tuple[float, float],
    open_tests: set[str],
    tests: int,
    remaining: RemainingTime,
    comparison: str = "",
) -> str:
    """Return the line for a finished pair.

    Args:
        pair: Number of the pair, from 1.
        stage: The stage that it belongs to, from 1.
        schedule: All pairs.
        durations_s: Duration of the sessions of base and head.
        open_tests: Tests without a verdict.
        tests: The number of all tests.
        remaining: Predicts the remaining time.
        comparison: Which of several comparisons it belongs to, such as ``comparison 3 of 10``.
    """
    due, most = sum(schedule.pairs[:stage]), sum(schedule.pairs)
    if pair == due and open_tests:
        # The stage is decided: the next one has begun.
        due = sum(schedule.pairs[: stage + 1])
    of = f"{due}, at most {most}" if open_tests and due < most else f"{due}"
    base, head = map(format_minutes, durations_s)
    parts = [f"[{comparison}{', ' if comparison else ''}pair {pair} of {of}] base {base}, head {head}"]
    parts.append(f"{len(open_tests)} of {count_tests(tests)} open" if open_tests else "no test open")
    if open_tests and due < most:
        parts.append(f"verdicts in about {format_left(remaining.predict_s(due - pair, open_tests))}")
    if open_tests and pair < most:
        parts.append(f"at most {format_left(remaining.predict_s(most - pair, open_tests))} left")
    return "; ".join(parts)


def format_minutes(seconds: float) -> str:
    """Format a duration as minutes and seconds: ``0:21``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def format_left(seconds: float) -> str:
    """Format a remaining time roughly: ``45 s`` or ``12 minutes``."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} minutes"
