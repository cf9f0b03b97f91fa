# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison and the order of their sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llenergy.compare.stages import Stages
from pytest_llenergy.record.report import SideName


@dataclass(frozen=True)
class Side:
    """What runs on one side: code, interpreter, environment and pytest options.

    Attributes:
        name: ``"base"`` or ``"head"``.
        origin: The name that the user gave, for reports.
        short: An abbreviated name for progress lines.
        root: The checkout.
        directory: The directory in which pytest starts.
        python: The interpreter.
        environment: The environment variables.
        options: Options of pytest for this side alone.
        venv: The virtual environment that was created for this side, if any.
    """

    name: SideName
    origin: str
    short: str
    root: Path
    directory: Path
    python: Path
    environment: Mapping[str, str] = field(repr=False)
    options: tuple[str, ...] = ()
    venv: Path | None = None


@dataclass(frozen=True)
class Turn:
    """One session; ``number`` counts all sessions from 1."""

    number: int
    side: SideName


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


def plan_schedule(stages: Stages, rounds: int) -> Schedule:
    """Return the sessions for each stage; a stage that ``rounds`` do not divide is rounded up."""
    return Schedule(tuple(math.ceil(count / rounds) for count in stages.pairs), rounds)
