# SPDX-License-Identifier: Apache-2.0
"""The two sides and the order of their sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llenergy.compare.stages import Stages
from pytest_llenergy.model.report import SideName

# What a side is: code, interpreter, environment and options of pytest.


@dataclass(frozen=True)
class Side:
    """One side. ``origin`` is what people call it, ``short`` is its name in a line.

    ``root`` is its checkout, ``directory`` where pytest is started, ``venv`` the environment that was made
    for it.
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


# In which order sessions run: in turn, so that what drifts hits both sides alike.


@dataclass(frozen=True)
class Turn:
    """One session: the ``number``-th of all, counted from 1."""

    number: int
    side: SideName


@dataclass(frozen=True)
class Schedule:
    """Pairs of sessions of each stage, with ``rounds`` of each test in a session."""

    pairs: tuple[int, ...]
    rounds: int

    @property
    def stages(self) -> Stages:
        """Pairs of rounds of each stage, as they are measured."""
        return Stages(tuple(count * self.rounds for count in self.pairs))

    def sessions_after(self, stage: int) -> int:
        """Sessions in all after so many stages."""
        return 2 * sum(self.pairs[:stage])

    def turns(self, stage: int) -> Iterator[tuple[Turn, Turn]]:
        """The pairs of a stage (counted from 1) as they follow: base head, head base, base head, …"""
        first = sum(self.pairs[: stage - 1])
        for pair in range(first, first + self.pairs[stage - 1]):
            sides: tuple[SideName, SideName] = ("base", "head") if pair % 2 == 0 else ("head", "base")
            yield Turn(2 * pair + 1, sides[0]), Turn(2 * pair + 2, sides[1])


def plan_schedule(stages: Stages, rounds: int) -> Schedule:
    """As many sessions as each stage needs; a stage that ``rounds`` do not divide is rounded up."""
    return Schedule(tuple(math.ceil(count / rounds) for count in stages.pairs), rounds)
