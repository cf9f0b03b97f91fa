# SPDX-License-Identifier: Apache-2.0
"""The protocol of a meter: cumulative joules per domain, with their source and accuracy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pytest_llenergy.energy.power_readings import PowerWatch
    from pytest_llenergy.record.base import EnergyKind
    from pytest_llenergy.record.record import Flag, MeterInfo

Limits = Callable[[float, float], tuple[float, float]]
"""``limits(energy_j, duration_s)``: the lowest and the highest true energy for a reading."""


#: Name of the thread that reads the meters.
READER_THREAD = "llenergy-sampler"

#: What a user may state at the end of a meter's argument.
STATED = re.compile(
    r"^(?P<rest>.*)@((?P<percent>\d+(\.\d+)?)%|(?P<watts>\d+(\.\d+)?)W|sum=(?P<sensors>[1-9]\d*))$", re.DOTALL
)

#: Highest power (W) of what one sensor is wired to, unless the user states another: a large server draws
#: 15 kW. More is an error of the sensor, such as 65,535 W, and would outweigh hours of valid readings.
HIGHEST_W = 20_000.0


def within(fraction: float, watts: float = 0.0) -> Limits:
    """Return the limits of a source that is accurate to ``fraction`` of its reading, and to some watts."""

    def limits(energy_j: float, duration_s: float) -> tuple[float, float]:
        off_j = fraction * abs(energy_j) + watts * duration_s
        return max(min(energy_j, 0.0), energy_j - off_j), energy_j + off_j

    return limits


class Domain(NamedTuple):
    """One cumulative counter.

    Attributes:
        name: Name in records, such as ``gpu:UUID`` or ``cpu:package-0``.
        kind: Whether the joules are measured or estimated.
        source: What is read, for the record.
        scope: What hardware the joules cover.
        resolution_j: Step of the counter (J).
        accuracy: Accuracy of the source in words.
        limits: Limits of the true energy from the accuracy of the source alone.
        update_period_s: Nominal time between two ticks; ``None`` if it must be observed.
        max_age_s: Greatest age of a reading; ``None`` for a counter that stands still between ticks.
        smear_s: Time until the readings show a change of power in full, for running averages.
        watch: What power readings show of themselves: whether they are averages, and refreshed in time.
        late_s: By how much the joules of a reading lag, at least and at most.
        tail_s: For how long, at the power of the work, the device may draw it before or after its marks.
        integrated: Whether the joules are integrated from power readings as they come: a reading that is not
            made is missing from them, while a counter goes on unread.
        coverage: Share of the time in which the sensor samples. A part-time sensor takes its sample for the
            whole of each tick.
        coverage_known: Whether ``coverage`` was measured; otherwise it is a lower limit.
        highest_w: Highest power of the device, if known.
        rests: Whether the counter stands still while nothing happens: a reading that repeats the previous one
            is then a tick too.
        cpu_ratio: For a counter of all processes of the host whose joules can be split by their CPU time: by
            what factor a CPU second of one may cost more than one of another.
        covers_others: Whether the joules may include those of other meters, so that they cannot be added.
        flags: Flags of every measurement with this domain, such as a rejected counter or a shared board.
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
    watch: PowerWatch | None = None
    late_s: tuple[float, float] = (0.0, 0.0)
    tail_s: float = 0.0
    integrated: bool = False
    coverage: float = 1.0
    coverage_known: bool = True
    highest_w: float | None = None
    rests: bool = False
    cpu_ratio: float | None = None
    covers_others: bool = False
    flags: tuple[Flag, ...] = ()

    def info(self, meter: str) -> MeterInfo:
        """Return the part that goes into a record."""
        from pytest_llenergy.record.record import MeterInfo

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
    """What the meters of a test must cover: GPUs, or the CPU, or both.

    Attributes:
        gpus: Full UUIDs.
        also_cpu: Whether a test with GPUs holds the CPU too, as work in pytest's own process does.
        processes: Processes that work for the test although this one did not start them, such as a server.
        unknown_processes: Why such processes are unknown, if they are.
    """

    gpus: tuple[str, ...] = ()
    also_cpu: bool = False
    processes: tuple[int, ...] = ()
    unknown_processes: str | None = None

    @property
    def cpu(self) -> bool:
        """Whether meters of the CPU apply: the test holds it, with or without GPUs."""
        return self.also_cpu or not self.gpus


class Meter(Protocol):
    """Domains that are read together. One thread at a time, usually a background thread, calls ``read``."""

    @property
    def name(self) -> str:
        """Short name, as in ``--energy-meter``."""

    @property
    def domains(self) -> Sequence[Domain]:
        """The domains, in the order of ``read``."""

    @property
    def poll_period_s(self) -> float:
        """Seconds between two readings, until the ticks of the counter can be predicted."""

    def read(self) -> Sequence[float | str]:
        """Return the joules of each domain since a fixed moment, or the reason why they are unavailable."""

    def close(self) -> None:
        """Release all resources. Called once."""


class MeterSpec(NamedTuple):
    """How to open a meter.

    Attributes:
        name: Name, as in ``--energy-meter``.
        kind: Estimates are opened last, and only where nothing was measured.
        open: ``open(targets)`` returns the open meters, one for each device whose counter ticks
            independently. It raises ``MeterDoesNotApply`` if the meter does not concern the targets, and
            ``MeterError`` with the reason and the remedy if it cannot read them on this machine.
        takes_argument: Whether the meter is selected as ``NAME:ARGUMENT``, so that it is opened with
            ``open(targets, argument)``.
        by_default: Whether the automatic selection includes the meter.
        host_wide: Whether the meter reads more than the targets, so that a test needs the host to itself.
        check: Called with the argument before any test; raises ``MeterError`` if no test can use it. None
            leaves that to ``open``.
    """

    name: str
    kind: EnergyKind
    open: Callable[..., Sequence[Meter]]
    takes_argument: bool = False
    by_default: bool = True
    host_wide: bool = True
    check: Callable[[str], object] | None = None


class Accuracy(NamedTuple):
    """Accuracy of a ``Domain``: in words, as limits, and with its flags."""

    words: str
    limits: Limits
    flags: tuple[Flag, ...] = ()


def unknown_accuracy(source: str) -> Accuracy:
    """Return an unknown accuracy: the limits exclude the error of the source, and a flag says this."""
    from pytest_llenergy.record.record import Flag

    detail = f"the accuracy of {source} is not known: limits and uncertainties leave its error out"
    return Accuracy("not known", within(0.0), (Flag(name="meter", severity="note", detail=detail),))


class Stated(NamedTuple):
    """What the user states about a meter: accuracy, highest power (W), sensors to be added (0: nothing)."""

    accuracy: Accuracy
    highest_w: float = HIGHEST_W
    sensors: int = 0


def parse_stated(argument: str, source: str) -> tuple[str, Stated]:
    """Split ``NAME@2%@3000W@sum=4`` into ``NAME`` and what is stated, each part of which may be missing."""
    stated = Stated(unknown_accuracy(source))
    while match := STATED.match(argument):
        argument = match["rest"]
        if match["percent"]:
            percent = float(match["percent"])
            words = f"within {percent:g}% of the reading, as stated by the user"
            stated = stated._replace(accuracy=Accuracy(words, within(percent / 100)))
        elif match["watts"]:
            stated = stated._replace(highest_w=float(match["watts"]))
        else:
            stated = stated._replace(sensors=int(match["sensors"]))
    return argument, stated
