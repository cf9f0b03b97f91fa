# SPDX-License-Identifier: Apache-2.0
"""The order of sessions, and the lines that say how far it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        least = f"{self.pairs[0]} to " if len(self.pairs) > 1 else ""
        return f"{self.stages} pairs of rounds: {least}{sum(self.pairs)} pairs of sessions"

    def describe_pair(self, pair: int, durations_s: Sequence[float], open_tests: int, tests: int) -> str:
        """Return the line for a finished pair: its time, the open tests, and the time that is left.

        Args:
            pair: Its number, from 1.
            durations_s: Duration of all sessions so far.
            open_tests: The number of tests without a verdict.
            tests: The number of all tests.
        """
        most = sum(self.pairs)
        parts = [f"{format_duration(sum(durations_s[-2:]))}; {open_tests} of {count_tests(tests)} open"]
        if open_tests and pair < most:
            # The first session of all may load models that later ones find.
            pair_s = 2 * sum(durations_s[1:]) / (len(durations_s) - 1)
            parts.append(f"at most {format_duration((most - pair) * pair_s)} left")
        return "; ".join(parts)


def plan_schedule(stages: Stages, rounds: int) -> Schedule:
    """Return the sessions for each stage; a stage that ``rounds`` do not divide is rounded up."""
    return Schedule(tuple(math.ceil(count / rounds) for count in stages.pairs), rounds)


def format_duration(seconds: float) -> str:
    """Format a duration roughly: ``45 s`` or ``12 minutes``."""
    return f"{max(1.0, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
