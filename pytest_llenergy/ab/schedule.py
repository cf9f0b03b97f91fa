# SPDX-License-Identifier: Apache-2.0
"""The order of sessions, and the lines that say how far it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pytest_llenergy.compare.stages import Stages
from pytest_llenergy.record.report import SideName
from pytest_llenergy.record.text import count_tests


@dataclass(frozen=True)
class Turn:
    """One session; ``number`` counts all sessions from 1."""

    number: int
    side: SideName

    @property
    def pair(self) -> int:
        """The number of its pair, from 1."""
        return (self.number + 1) // 2


@dataclass(frozen=True)
class Schedule:
    """Pairs of sessions for each stage, with ``rounds`` of each test in a session."""

    pairs: tuple[int, ...]
    rounds: int

    @property
    def stages(self) -> Stages:
        """Pairs of rounds of each stage, as they are measured."""
        return Stages(tuple(count * self.rounds for count in self.pairs))

    def turns(self, stage: int) -> Iterator[tuple[Turn, Turn]]:
        """Yield the pairs of a stage (counted from 1) in order: base head, head base, base head, …

        The alternation makes drift affect both sides alike.
        """
        first = sum(self.pairs[: stage - 1])
        for pair in range(first, first + self.pairs[stage - 1]):
            sides: tuple[SideName, SideName] = ("base", "head") if pair % 2 == 0 else ("head", "base")
            yield Turn(2 * pair + 1, sides[0]), Turn(2 * pair + 2, sides[1])

    def describe(self) -> str:
        """Describe how much is measured: ``6+6 pairs of rounds: 6 to 12 pairs of sessions``."""
        first, most = self.pairs[0], sum(self.pairs)
        if first == most:
            return f"{self.stages} pairs of rounds: {most} pair{'' if most == 1 else 's'} of sessions"
        return f"{self.stages} pairs of rounds: {first} to {most} pairs of sessions, as tests need"

    def describe_pair(
        self,
        turn: Turn,
        stage: int,
        durations_s: Sequence[float],
        open_tests: Collection[str],
        tests: int,
        name: str = "",
    ) -> str:
        """Return the line for a finished pair: its time, the open tests, and the time that is left.

        Args:
            turn: A session of the pair.
            stage: The stage that the pair belongs to, from 1.
            durations_s: Duration of all sessions so far.
            open_tests: Tests without a verdict.
            tests: The number of all tests.
            name: Which of several comparisons it belongs to, such as ``comparison 3 of 10``.
        """
        due, most = sum(self.pairs[:stage]), sum(self.pairs)
        if turn.pair == due and open_tests:
            # The stage is decided: the next one has begun.
            due = sum(self.pairs[: stage + 1])
        of = f"{due}, at most {most}" if open_tests and due < most else f"{due}"
        parts = [f"[{name}{', ' if name else ''}pair {turn.pair} of {of}]"]
        parts[0] += f" {format_duration(sum(durations_s[-2:]))}"
        parts.append(f"{len(open_tests)} of {count_tests(tests)} open" if open_tests else "no test open")
        # The first session of all may load models that later ones find.
        pair_s = 2 * sum(durations_s[1:]) / max(len(durations_s) - 1, 1)
        if open_tests and due < most:
            parts.append(f"verdicts in about {format_duration((due - turn.pair) * pair_s)}")
        if open_tests and turn.pair < most:
            parts.append(f"at most {format_duration((most - turn.pair) * pair_s)} left")
        return "; ".join(parts)


def plan_schedule(stages: Stages, rounds: int) -> Schedule:
    """Return the sessions for each stage; a stage that ``rounds`` do not divide is rounded up."""
    return Schedule(tuple(math.ceil(count / rounds) for count in stages.pairs), rounds)


def format_duration(seconds: float) -> str:
    """Format a duration roughly: ``45 s`` or ``12 minutes``."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} minutes"
