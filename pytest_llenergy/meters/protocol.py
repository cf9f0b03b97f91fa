# SPDX-License-Identifier: Apache-2.0
"""What a meter is: cumulative joules per domain, and an honest account of how it knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_llenergy.model.record import Kind, MeterInfo


def within(fraction: float) -> Callable[[float, float], tuple[float, float]]:
    """Limits of a source that is right to ``fraction`` of its reading."""

    def limits(energy_j: float, _duration_s: float) -> tuple[float, float]:
        return energy_j * (1 - fraction), energy_j * (1 + fraction)

    return limits


@dataclass(frozen=True)
class Domain:
    """One cumulative counter.

    ``limits(energy_j, duration_s)`` gives the lowest and highest true energy (joules) that a reading of
    ``energy_j`` over ``duration_s`` allows when nothing but the source's accuracy is in doubt.
    ``update_period_s`` is ``None`` where it is only known by watching the counter tick.
    """

    name: str
    kind: Kind
    source: str
    scope: str
    update_period_s: float | None
    resolution_j: float
    accuracy: str
    limits: Callable[[float, float], tuple[float, float]]

    def info(self, meter: str) -> MeterInfo:
        """The part that goes into a record."""
        return MeterInfo(
            name=meter,
            domain=self.name,
            kind=self.kind,
            source=self.source,
            scope=self.scope,
            update_period_s=self.update_period_s,
            resolution_j=self.resolution_j,
            accuracy=self.accuracy,
        )


@dataclass(frozen=True)
class Targets:
    """What a test uses and a meter must therefore cover: GPUs by full UUID, or the CPU."""

    gpus: tuple[str, ...] = ()

    @property
    def cpu(self) -> bool:
        """A test without GPUs is a test of the CPU."""
        return not self.gpus


class Meter(Protocol):
    """An open meter. ``read`` is called from one background thread every ``poll_period_s``."""

    @property
    def name(self) -> str:
        """Short name, as in ``--energy-meter``."""

    @property
    def domains(self) -> Sequence[Domain]:
        """What it reads, in the order of ``read``."""

    @property
    def poll_period_s(self) -> float:
        """Seconds between two readings."""

    def read(self) -> Sequence[float | str]:
        """Joules since some fixed moment for each domain, or the reason why there is no value now."""

    def close(self) -> None:
        """Release what was opened. Called once."""


@dataclass(frozen=True)
class MeterSpec:
    """How to open a meter.

    ``open(targets)`` returns an open meter and raises ``MeterError`` with the reason when the targets
    cannot be read on this machine. ``kind`` decides the order: estimates come last, and only where
    nothing was measured.
    """

    name: str
    kind: Kind
    open: Callable[[Targets], Meter]
