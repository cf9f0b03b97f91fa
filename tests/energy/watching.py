# SPDX-License-Identifier: Apache-2.0
"""Run the real background reader, without its thread, on a simulated clock.

Readings take wall-clock and CPU time, wake-ups come late, and now and then the machine stalls. While a loop
holds the interpreter's lock, the reader waits for it after each wake-up and each call of a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from pytest_llenergy.energy.meters.base import Domain, Meter
from pytest_llenergy.energy.power_readings import IntegratedPower
from pytest_llenergy.energy.sampler import Reader
from pytest_llenergy.energy.trace import Series

from .waves import MS, S, Sensor

#: CPU time of a wake-up and of one reading (nanoseconds).
WAKE_NS, READ_NS = 60_000, 25_000

#: How long a busy thread keeps the interpreter's lock (nanoseconds): the default switch interval.
SWITCH_NS = 5 * MS


class Machine:
    """Two clocks: monotonic time, and the CPU time of the reader.

    Between the two moments ``holding_ns`` a loop in the same process holds the interpreter's lock.
    """

    def __init__(self, now_ns: int, holding_ns: tuple[int, int] = (0, 0)) -> None:
        self.now_ns = now_ns
        self.spent_ns = 0
        self.handovers = 0
        self._holding_ns = holding_ns

    @property
    def used_ns(self) -> int:
        """CPU time of the whole process."""
        begin_ns, end_ns = self._holding_ns
        return self.spent_ns + max(0, min(self.now_ns, end_ns) - begin_ns)

    def work(self, time_ns: int) -> None:
        """Spend CPU time."""
        self.now_ns += time_ns
        self.spent_ns += time_ns

    def take_lock(self) -> None:
        """Wait until the loop releases the interpreter's lock, if it holds it."""
        if self._holding_ns[0] <= self.now_ns < self._holding_ns[1]:
            self.now_ns += SWITCH_NS
            self.handovers += 1


class SensorMeter:
    """A meter of one sensor: reads its counter or integrates its power."""

    name = "nvml"

    def __init__(self, machine: Machine, sensor: Sensor, domain: Domain) -> None:
        self._machine, self._sensor = machine, sensor
        self._integral = IntegratedPower(sensor.latch_ns / S) if domain.integrated else None
        self.domains: Sequence[Domain] = (domain,)
        self.poll_period_s = min(max(sensor.latch_ns / S / 10, 0.005), 0.01) if domain.integrated else 0.01

    def read(self) -> list[float | str]:
        self._machine.work(READ_NS // 2)
        now_ns = self._machine.now_ns
        self._machine.work(READ_NS // 2)
        self._machine.take_lock()
        if self._integral is None:
            return [self._sensor.counter_j(now_ns)]
        return [self._integral.add(now_ns / S, self._sensor.watts(now_ns))]

    def close(self) -> None:
        """Do nothing: the simulated sensor holds no resources."""


class Spell(NamedTuple):
    """A stretch of time in which something is measured (``at_work``), as a window or not, or nothing runs."""

    start_ns: int
    end_ns: int
    at_work: bool
    window: bool = False


def simulate_reader(
    sensors: Sequence[Sensor],
    rng: Random,
    start_ns: int,
    end_ns: int,
    domain: Domain,
    spells: Iterable[Spell] = (),
    holding_ns: tuple[int, int] = (0, 0),
    woken_ns: list[int] | None = None,
) -> Series:
    """Let one reader poll all sensors from start to end and return the series of the first.

    ``holding_ns``: see ``Machine``. Wake-up times are appended to ``woken_ns``.
    """
    machine = Machine(start_ns, holding_ns)
    domains = [domain._replace(name=f"{domain.name}{index or ''}") for index in range(len(sensors))]
    meters = [SensorMeter(machine, sensor, each) for sensor, each in zip(sensors, domains, strict=True)]
    return run_reader(machine, meters, rng, end_ns, spells, woken_ns)


def run_reader(
    machine: Machine,
    meters: Sequence[Meter],
    rng: Random,
    end_ns: int,
    spells: Iterable[Spell] = (),
    woken_ns: list[int] | None = None,
) -> Series:
    """Let one reader read the meters of a machine until the end and return the first series."""
    reader = Reader(meters, lambda: machine.now_ns, lambda: machine.spent_ns, lambda: machine.used_ns)
    events = _events(reader, spells)
    wake_ns = machine.now_ns
    reader.begin()
    reader.wake()
    while machine.now_ns < end_ns:
        if events and events[0].time_ns <= wake_ns:
            event = events.pop(0)
            machine.now_ns = max(machine.now_ns, event.time_ns)
            event.happen()
            if not event.calls():
                continue
            wake_ns = machine.now_ns
        machine.now_ns = max(machine.now_ns, wake_ns)
        machine.take_lock()
        if woken_ns is not None:
            woken_ns.append(machine.now_ns)
        machine.work(rng.randrange(WAKE_NS, 2 * WAKE_NS))
        wake_ns = reader.read_due_meters() + _late_ns(rng)
    return reader.meters[0].series[0]


def _late_ns(rng: Random) -> int:
    """Draw a wake-up delay."""
    return rng.randrange(50_000, MS // 2) + (rng.randrange(40 * MS) if rng.random() < 0.02 else 0)


class _Event(NamedTuple):
    """A notification to the reader, and whether it interrupts its sleep, as in ``Sampler``."""

    time_ns: int
    happen: Callable[[], object]
    calls: Callable[[], bool]


def _events(reader: Reader, spells: Iterable[Spell]) -> list[_Event]:
    """Return the notifications of all spells in time order."""
    events: list[_Event] = []
    for spell in spells:
        if spell.at_work:
            begin = partial(reader.budget.begin_work, window=spell.window)
            end = partial(reader.budget.end_work, window=spell.window)
            events.append(_Event(spell.start_ns, begin, lambda: reader.asleep))
            events.append(_Event(spell.end_ns, end, lambda: True))
        else:
            closely = reader.budget.reading_closely()
            events.append(_Event(spell.start_ns, closely.__enter__, lambda: True))
            leave = partial(closely.__exit__, None, None, None)
            events.append(_Event(spell.end_ns, leave, lambda: False))
    return sorted(events, key=lambda event: event.time_ns)
