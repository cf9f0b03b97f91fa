# SPDX-License-Identifier: Apache-2.0
"""Recordings of real boards beside an external power meter, replayed to the package on a simulated clock.

Of the two kinds of board, ``replayed`` has the readings of the recording at the moments at which the real
driver refreshed them. ``stitched`` has the power of the external meter, cut into work of other lengths, under
a sensor of the recorded kind (refresh, share of each refresh, gain, offset) in random phase.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_llenergy.devices.nvml import BoardHandle, Quantity
from pytest_llenergy.energy import selfcheck
from pytest_llenergy.energy.meters import nvml
from pytest_llenergy.energy.timeouts import LONGEST_CHECK_S
from pytest_llenergy.energy.trace import Series
from tests.energy.watching import READ_NS, Machine, Spell, run_reader
from tests.energy.waves import EPOCH, S

FOLDER = "LLENERGY_RECORDINGS"
WHERE = (
    f"set {FOLDER} to a folder of recordings (*.npz); the data are public: GPU_Power_Benchmark of Yang, "
    "Adamek and Armour (SC 2024, MIT licence), https://github.com/JimZeyuYang/GPU_Power_Benchmark"
)

#: Ways of reading a board: the energy counter, the present power, or only ``nvmlDeviceGetPowerUsage``.
COUNTER, PRESENT, USAGE = "counter", "present power", "nvmlDeviceGetPowerUsage"

#: Seconds of idle power before a recording or the first work, and after the last.
BEFORE_S, AFTER_S = 9.0, 4.0

#: Refreshes over which a board averages, and those after which an idle one refreshes its average.
AVERAGED, IDLE_REFRESHES = 11, 10

GRID_S = 0.0005


@dataclass(frozen=True)
class Recording:
    """What a driver and an external meter read while a board idled, worked and idled again.

    ``present`` and ``average`` are the moments at which the readings changed (seconds of one clock), and the
    readings (W); ``average`` is empty where the driver has none. A reading is gain times the meter plus
    offset.
    """

    name: str
    product: str
    limit_w: float
    period_s: float
    gain: float
    offset_w: float
    load_s: tuple[float, float]
    switched: int
    present: tuple[Any, Any]
    average: tuple[Any, Any]
    meter: tuple[Any, Any]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which it can be read."""
        return (COUNTER, PRESENT, USAGE) if len(self.average[0]) else (COUNTER, USAGE)

    @property
    def alternates(self) -> bool:
        """Whether its load goes up and down, in step with the refresh."""
        return self.switched > 4

    @property
    def seen_s(self) -> float:
        """How much of each refresh the sensor samples (seconds)."""
        return (nvml.known_coverage(self.product) or 1.0) * self.period_s

    @cached_property
    def scale_w(self) -> float:
        """How well gain and offset describe the sensor: the scatter (W) of its readings around them."""
        moments, watts = self.present
        of = Board(self, self.present, self.average, self.meter)
        means = [
            (watt, of.true_j(moment - self.seen_s, moment) / self.seen_s)
            for moment, watt in zip(moments, watts, strict=True)
            if self.meter[0][0] < moment - self.seen_s and moment < self.meter[0][-1]
        ]
        return float(np.sqrt(np.mean([(read - true) ** 2 for read, true in means])))


def load_recordings(folder: Path | None = None) -> list[Recording]:
    """Return all recordings beside a meter in a folder, by default in the one that the environment names.

    Raises:
        LookupError: The environment names none; says where the data are.
    """
    return [_load(path) for path in _files(folder) if "meter_s" in np.load(path)]


def load_counters(folder: Path | None = None) -> list[CounterRecording]:
    """Return all recordings of a board's own counter, without a meter. Raises as ``load_recordings``."""
    found = [(path, np.load(path)) for path in _files(folder)]
    return [CounterRecording(path.stem, dict(raw)) for path, raw in found if "counter_s" in raw]


def _files(folder: Path | None) -> list[Path]:
    if folder is None and not os.environ.get(FOLDER):
        raise LookupError(WHERE)
    return sorted((folder or Path(os.environ[FOLDER])).glob("*.npz"))


def _load(path: Path) -> Recording:
    with np.load(path) as raw:
        present, average, meter = (
            (raw[f"{each}_s"].astype(float), raw[f"{each}_w"].astype(float))
            for each in ("instant", "average", "meter")
        )
        limit_w, period_s, gain, offset_w = (
            float(raw[f]) for f in ("limit_w", "period_s", "gain", "offset_w")
        )
        switched = [float(each) for each in raw["load_s"]]
        load_s = switched[0], switched[1 if len(switched) < 4 else -1]
        return Recording(
            path.stem,
            str(raw["name"]),
            limit_w,
            period_s,
            gain,
            offset_w,
            load_s,
            len(switched),
            present,
            average,
            meter,
        )


@dataclass(frozen=True)
class Board:
    """A board on a timeline in seconds: refreshes of both readings, and the power of the external meter."""

    recording: Recording
    present: tuple[Any, Any]
    average: tuple[Any, Any]
    meter: tuple[Any, Any]

    @cached_property
    def _counted_j(self) -> Any:
        moments, watts = self.present
        return np.cumsum(watts * np.diff(moments, prepend=moments[0])) + 5000.0

    @cached_property
    def _metered_j(self) -> Any:
        moments, watts = self.meter
        return np.concatenate([[0.0], np.cumsum((watts[1:] + watts[:-1]) / 2 * np.diff(moments))])

    def counter_j(self, moment: float) -> float:
        """Return the readings of present power, summed at each refresh: a synthetic counter."""
        return float(self._counted_j[_last(self.present[0], moment)])

    def watts(self, moment: float, *, averaged: bool) -> float:
        """Return a reading."""
        moments, watts = self.average if averaged and len(self.average[0]) else self.present
        return float(watts[_last(moments, moment)])

    def meter_j(self, start_s: float, end_s: float) -> float:
        """Return what the external meter says."""
        joules = np.interp((start_s, end_s), self.meter[0], self._metered_j)
        return float(joules[1] - joules[0])

    def true_j(self, start_s: float, end_s: float) -> float:
        """Return the same on the sensor's own scale."""
        of = self.recording
        return of.gain * self.meter_j(start_s, end_s) + of.offset_w * (end_s - start_s)


def _last(moments: Any, moment: float) -> int:
    return max(0, int(np.searchsorted(moments, moment, side="right")) - 1)


@dataclass(frozen=True)
class CounterRecording:
    """What a board's own counter and power readings showed, and when work began and ended (seconds)."""

    name: str
    raw: dict[str, Any]

    @property
    def recording(self) -> Any:
        """The product and its power limit."""
        return SimpleNamespace(product=str(self.raw["name"]), limit_w=float(self.raw.get("limit_w", 700.0)))

    def counter_j(self, moment: float) -> float:
        """Return a reading of the counter."""
        return float(self.raw["counter_j"][_last(self.raw["counter_s"], moment)])

    def watts(self, moment: float, *, averaged: bool) -> float:
        """Return a reading of present power, or of ``nvmlDeviceGetPowerUsage``."""
        which = "usage" if averaged else "instant"
        return float(self.raw[f"{which}_w"][_last(self.raw[f"{which}_s"], moment)])

    def work(self, gap_s: float) -> list[tuple[float, float]]:
        """Return stretches of work with quiet gaps of ``gap_s`` around them, after the check of the board."""
        loads, found = self.raw["load_s"], list[list[float]]()
        for start_s, end_s in loads:
            if found and start_s - found[-1][1] < 2 * gap_s:
                found[-1][1] = end_s
            else:
                found.append([start_s, end_s])
        inside = self.raw["counter_s"][0] + 5.0, self.raw["counter_s"][-1] - 2.0
        return [(a, b) for a, b in found if inside[0] < a and b < inside[1]]

    def far_j(self, start_s: float, end_s: float, away_s: float) -> float:
        """Return the energy of a stretch from ticks far from it, with the power beyond them."""
        moments, joules = self.raw["counter_s"], self.raw["counter_j"]
        first, last = _last(moments, start_s), int(np.searchsorted(moments, end_s + away_s))
        before_w, after_w = (
            (joules[b] - joules[a]) / (moments[b] - moments[a])
            for a, b in ((_last(moments, start_s - 1.0), first), (last, _last(moments, end_s + away_s + 0.6)))
        )
        outside_j = before_w * (start_s - moments[first]) + after_w * (moments[last] - end_s)
        return float(joules[last] - joules[first] - outside_j)


def replayed(of: Recording) -> Board:
    """Return a recorded board, between stretches of the idle power at the end of its recording."""
    end_s = of.present[0][-1]
    start_s = of.present[0][np.searchsorted(of.present[0], max(end_s - 3.0, of.load_s[1] + 2.1))]
    # The first change is that which the recording began with; where a reading repeats, none is recorded.
    present = [_with_repeats(of.period_s, *(each[1:] for each in of.present))]
    average = [tuple(each[1:] for each in of.average)]
    for readings in (present, average):
        moments, watts = readings[0]
        idle = (moments > start_s) & (moments <= end_s)
        for times in range(1, round(BEFORE_S / (end_s - start_s)) + 1):
            shift_s = of.present[0][1] - end_s - (times - 1) * (end_s - start_s)
            readings.insert(0, (moments[idle] + shift_s, watts[idle]))
        readings += [(moments[idle] + (end_s - start_s) * times, watts[idle]) for times in (1, 2)]
    joined = [
        (np.concatenate([a for a, _ in all_]), np.concatenate([b for _, b in all_]))
        for all_ in (present, average)
    ]
    return Board(of, joined[0], joined[1], of.meter)


def _with_repeats(period_s: float, moments: Any, watts: Any) -> tuple[Any, Any]:
    """Return refreshes from changes: where several refreshes passed, readings were repeated."""
    passed = np.maximum(1, np.round(np.diff(moments) / period_s)).astype(int)
    steps = np.repeat(np.diff(moments) / passed, passed)
    return np.cumsum([moments[0], *steps]), np.append(np.repeat(watts[:-1], passed), watts[-1])


def stitched(
    of: Recording,
    rng: Random,
    work: Sequence[tuple[float, float]],
    halved: Sequence[tuple[float, float]] = (),
) -> Board:
    """Return a board that works and rests for the given times (seconds), again and again from 0 on.

    Each work begins as the recorded load does, ends as it does, and is followed by what followed that. In the
    spans of ``halved`` power is half way between that and idle power.
    """
    start_s, end_s = of.load_s
    idle_s = (max(of.meter[0][0], start_s - 0.9), start_s)
    pieces = [idle_s] * round(BEFORE_S / (idle_s[1] - idle_s[0]))
    before_s = sum(b - a for a, b in pieces)
    for number, (length_s, rest_s) in enumerate(work):
        last = number == len(work) - 1
        pieces += [
            (start_s, start_s + length_s / 2),
            (end_s - length_s / 2, end_s + (AFTER_S if last else rest_s)),
        ]
    moments = np.arange(0.0, sum(b - a for a, b in pieces), GRID_S) - before_s
    borders = np.cumsum([0.0, *(b - a for a, b in pieces)]) - before_s
    piece = np.clip(np.searchsorted(borders, moments, side="right") - 1, 0, len(pieces) - 1)
    sources = np.array([a for a, _ in pieces])[piece] + moments - borders[piece]
    watts = np.interp(sources, *of.meter)
    idle_w = float(np.mean(watts[moments < 0]))
    for a, b in halved:
        within = (moments >= a) & (moments < b)
        watts[within] = (watts[within] + idle_w) / 2
    board = Board(of, (np.zeros(1), np.zeros(1)), (np.zeros(0), np.zeros(0)), (moments, watts))
    refreshes = np.arange(moments[0] + (1 + rng.random()) * of.period_s, moments[-1], of.period_s)
    read = np.array([board.true_j(t - of.seen_s, t) for t in refreshes]) / of.seen_s
    average = (np.zeros(0), np.zeros(0))
    if len(of.average[0]):
        means = np.convolve(read, np.ones(AVERAGED) / AVERAGED)[: len(read)]
        means[:AVERAGED] = means[AVERAGED]
        average = _refreshed_rarely(refreshes, means, float(np.quantile(read, 0.02)) * 1.08)
    return Board(of, (refreshes, np.round(read, 2)), (average[0], np.round(average[1], 2)), board.meter)


def _refreshed_rarely(moments: Any, means: Any, idle_w: float) -> tuple[Any, Any]:
    """Return the refreshes of an average, of which an idle board makes one in ``IDLE_REFRESHES``."""
    kept, since = [0], 0
    for number, watts in enumerate(means):
        since += 1
        if watts > idle_w or since >= IDLE_REFRESHES:
            kept.append(number)
            since = 0
    return moments[kept], means[kept]


class ReplaySession:
    """An NVML session on one board, whose time is that of a simulated machine."""

    def __init__(self, board: Board | CounterRecording, machine: Machine, way: str) -> None:
        self.board, self._machine, self._way = board, machine, way
        of = board.recording
        self.handle = BoardHandle("GPU-replayed", of.product, 0, "GPU-replayed", 0)
        limit = round(board.recording.limit_w * 1000)
        self.module: Any = SimpleNamespace(
            NVMLError=OSError,
            nvmlDeviceGetEnforcedPowerLimit=lambda _: limit,
            nvmlDeviceGetPowerManagementDefaultLimit=lambda _: limit,
            nvmlDeviceGetPowerManagementLimitConstraints=lambda _: (limit, limit),
        )

    def read(self, _handle: Any, quantities: Sequence[Quantity]) -> list[float | str]:
        """Return the readings of the present moment."""
        self._machine.work(READ_NS // 2)
        moment = (self._machine.now_ns - EPOCH) / S
        found = [self._value(each, moment) for each in quantities]
        self._machine.work(READ_NS // 2)
        return found

    def _value(self, quantity: Quantity, moment: float) -> float | str:
        if quantity == nvml.COUNTERS[0] and self._way == COUNTER:
            return round(self.board.counter_j(moment), 3)
        if quantity == nvml.POWERS[0] and self._way != USAGE:
            return self.board.watts(moment, averaged=False)
        if quantity == nvml.POWER_USAGE:
            return self.board.watts(moment, averaged=True)
        return "Not Supported"

    def make_reader(self, handle: Any, quantity: Quantity) -> Any:
        """Return a function that reads one quantity."""
        return lambda: self.read(handle, (quantity,))[0]

    def close(self) -> None:
        """Do nothing."""


def replay(
    board: Board | CounterRecording,
    way: str,
    rng: Random,
    work: Sequence[tuple[float, float]],
    until_s: float,
    *,
    in_rounds: bool,
) -> Series:
    """Let the package check the board, choose what to read, and read it beside the work until ``until_s``.

    Args:
        board: The board.
        way: Way of reading.
        rng: Randomness of the machine.
        work: Start and end of each window or round (seconds).
        until_s: When to stop.
        in_rounds: Whether the time between is read closely, as gaps of rounds are.
    """
    begin_s = work[0][0] - rng.uniform(0.5, 2.5)
    machine = Machine(EPOCH + round((begin_s - LONGEST_CHECK_S - 0.2) * S))
    clock = SimpleNamespace(
        monotonic=lambda: machine.now_ns / S,
        monotonic_ns=lambda: machine.now_ns,
        sleep=lambda seconds: machine.work(round(seconds * S)),
    )
    session: Any = ReplaySession(board, machine, way)
    modules = [vars(nvml), vars(selfcheck)]
    kept = [module["real_time"] for module in modules]
    try:
        for module in modules:
            module["real_time"] = clock
        sources = nvml.find_sources(session, session.handle)
        uuid = session.handle.uuid
        polls = {uuid: nvml._poll(session, sources)}
        checked = selfcheck.check_counters(polls, {uuid: sources.power_age_s})[uuid]
        meter = nvml.NvmlMeter(session, sources, checked)
        machine.now_ns, machine.spent_ns = EPOCH + round(begin_s * S), 0
        edges = [(EPOCH + round(a * S), EPOCH + round(b * S)) for a, b in work]
        spells = [Spell(*edge, at_work=True, window=not in_rounds) for edge in edges]
        closely = [(end, end + round(0.35 * S)) for _, end in edges]
        closely += [(start - round(0.35 * S), start) for start, _ in edges] if in_rounds else []
        spells += [Spell(*each, at_work=False) for each in closely]
        return run_reader(machine, [meter], rng, EPOCH + round(until_s * S), spells)
    finally:
        for module, real_time in zip(modules, kept, strict=True):
            module["real_time"] = real_time
