# SPDX-License-Identifier: Apache-2.0
"""The protocol of a meter: cumulative joules per domain, and how they are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytest_llenergy.model.record import Flag

if TYPE_CHECKING:
    from pytest_llenergy.model.base import EnergyKind
from pytest_llenergy.model.record import MeterInfo

# What a meter is: cumulative joules per domain, and an honest account of how it knows them.

Limits = Callable[[float, float], tuple[float, float]]
"""``limits(energy_j, duration_s)``: the lowest and the highest true energy that a reading allows."""


def within(fraction: float) -> Limits:
    """Limits of a source that is right to ``fraction`` of its reading."""

    def limits(energy_j: float, _duration_s: float) -> tuple[float, float]:
        return energy_j * (1 - fraction), energy_j * (1 + fraction)

    return limits


class Domain(NamedTuple):
    """One cumulative counter.

    ``limits`` holds when nothing but the source's accuracy is in doubt; ``accuracy`` says it in words.

    What is known of its time behaviour, in seconds:

    - ``update_period_s``: nominal time between two ticks; ``None`` where only watching tells.
    - ``max_age_s``: no reading is ever older; ``None`` for a counter that stands still between ticks.
    - ``smear_s``: how long a change of power takes to be over in the readings, for running averages.
    - ``late_s``: the joules of a reading are those of a moment that was at least and at most so long before.

    ``integrated`` says that the joules are made of power readings as they come: one that is not made is
    missing from them, while a counter goes on when nobody reads it.

    ``coverage`` is the share of the time in which the sensor looks: a part-time sensor takes what it saw
    for the whole of each tick. ``highest_w`` is the most that the device may draw, where it is known.
    ``covers_others`` says that what other meters read may be inside: the joules cannot be added to theirs.
    ``flags`` are true of every measurement with this domain (a rejected counter, a shared board).
    """

    name: str
    kind: EnergyKind
    source: str
    scope: str
    resolution_j: float
    accuracy: str
    limits: Limits
    update_period_s: float | None = None
    max_age_s: float | None = None
    smear_s: float = 0.0
    late_s: tuple[float, float] = (0.0, 0.0)
    integrated: bool = False
    coverage: float = 1.0
    highest_w: float | None = None
    covers_others: bool = False
    flags: tuple[Flag, ...] = ()

    def info(self, meter: str) -> MeterInfo:
        """The part that goes into a record."""
        from pytest_llenergy.model.record import MeterInfo

        return MeterInfo(
            name=meter,
            domain=self.name,
            kind=self.kind,
            source=self.source,
            scope=self.scope,
            update_period_s=self.update_period_s,
            resolution_j=self.resolution_j,
            coverage=self.coverage,
            accuracy=self.accuracy,
        )


class Targets(NamedTuple):
    """What a test uses and a meter must therefore cover: GPUs by full UUID, or the CPU."""

    gpus: tuple[str, ...] = ()

    @property
    def cpu(self) -> bool:
        """A test without GPUs is a test of the CPU."""
        return not self.gpus


class Meter(Protocol):
    """What is read in one go. ``read`` is called from one thread at a time, mostly a background one."""

    @property
    def name(self) -> str:
        """Short name, as in ``--energy-meter``."""

    @property
    def domains(self) -> Sequence[Domain]:
        """What it reads, in the order of ``read``."""

    @property
    def poll_period_s(self) -> float:
        """Seconds between two readings, until it is known when the counter ticks."""

    def read(self) -> Sequence[float | str]:
        """Joules since some fixed moment for each domain, or the reason why there is no value now."""

    def close(self) -> None:
        """Release what was opened. Called once."""


class MeterSpec(NamedTuple):
    """How to open a meter.

    ``open(targets)`` returns the open meters, one for each device whose counter ticks in its own time. It
    raises ``MeterDoesNotApply`` where it has nothing to do with the targets, and ``MeterError`` with the
    reason and the remedy when it cannot read them on this machine. ``kind`` decides the order: estimates
    come last, and only where nothing was measured. With ``takes_argument`` it is chosen as
    ``NAME:ARGUMENT``, and ``open(targets, argument)`` is called. ``host_wide`` says that it reads more than
    the targets: a test that is measured by it has the host to itself.
    """

    name: str
    kind: EnergyKind
    open: Callable[..., Sequence[Meter]]
    takes_argument: bool = False
    by_default: bool = True
    host_wide: bool = True


# Accuracy of meters that the user names: as the user states it, or not known.

STATED = re.compile(r"^(?P<rest>.*)@(?P<percent>\d+(\.\d+)?)%$", re.DOTALL)


@dataclass(frozen=True)
class Accuracy:
    """For a ``Domain``: words, limits and flags."""

    words: str
    limits: Limits
    flags: tuple[Flag, ...] = ()


def unknown_accuracy(source: str) -> Accuracy:
    """Nobody said how accurate a source is: the limits hold none of its error, and a flag says so."""
    detail = f"{source} does not say how accurate it is: limits and uncertainties leave its error out"
    return Accuracy(
        "not known", within(0.0), (Flag(name="accuracy-unknown", severity="note", detail=detail),)
    )


def parse_accuracy(argument: str, source: str) -> tuple[str, Accuracy]:
    """``NAME@2%`` is ``NAME``, right to 2 % of its reading. Without it the accuracy is not known."""
    match = STATED.match(argument)
    if match is None:
        return argument, unknown_accuracy(source)
    percent = float(match["percent"])
    words = f"within {percent:g}% of the reading, as stated by the user"
    return match["rest"], Accuracy(words, within(percent / 100))
