# SPDX-License-Identifier: Apache-2.0
"""Self-check of an energy counter, once per board, driver and boot: is it usable, and when does it tick?

For a second or two the counter is polled together with the board's power. The readings give the period of the
ticks, and show whether the counter agrees with the integral of power over the same ticks. Counters that stand
still, run backwards or count half of the joules exist, and a single reading does not reveal them.

Results are cached, so that a board is checked once per driver, boot and version of this package.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median, median_low, stdev
from typing import ClassVar, NamedTuple

import msgspec

from pytest_llenergy import __version__, real_time
from pytest_llenergy.energy.power_readings import ENOUGH_CHANGES
from pytest_llenergy.energy.timeouts import (
    CHECK_POLL_S,
    EVALUATE_EVERY_S,
    LONGEST_CHECK_S,
    SHORTEST_CHECK_S,
    STANDSTILL_S,
)
from pytest_llenergy.record.base import StoredStruct, cache_directory
from pytest_llenergy.record.files import read_limited

#: The largest difference from integrated power that the gains of two sensors explain (nvml.GAIN_LIMIT).
DISAGREEMENT = 0.05

#: Regular ticks after which the check may end before ``LONGEST_CHECK_S``, and the largest ``ratio_margin``.
ENOUGH_TICKS = 10
SMALL_MARGIN = 0.02

#: A counter that moves between at least this share of its readings moves all the time.
CONTINUOUS = 0.95

#: Ticks are joined into spans of at least this length before counter and power are compared (seconds).
SPAN_S = 0.05

#: Deviations up to this many standard deviations count as possible.
SIGMAS = 3.0

#: A rejected counter, or one that could not be compared precisely on a busy board, is checked again after
#: this time (seconds).
PROVISIONAL_S = 3600.0

#: Reads the joules and watts of one board; ``None`` for a quantity that the board does not have.
Poll = Callable[[], tuple[float | None, float | None]]


class CheckResult(StoredStruct, frozen=True):
    """Result of the self-check of a board.

    Attributes:
        duration_s: Length of the check.
        ticks: Number of ticks of the counter.
        period_s: Typical time between ticks.
        jitter_s: Median absolute deviation from ``period_s``, including the time between polls.
        longest_s: Longest time between two ticks, including the time between polls.
        still_s: Longest time in which the counter did not move; ``None`` without a counter.
        continuous: The counter moved between any two polls, so ``period_s`` is only an upper limit.
        ratio: Energy of the counter over integrated power; ``None`` without power readings.
        ratio_margin: Margin of error of ``ratio`` from sampling, as a share of the energy.
        power_period_s: Typical time between changes of the power reading; ``None`` below three changes.
        power_changes: Number of these changes.
        power_continuous: The power reading changed between any two polls.
        mean_w: Mean of the power readings.
        reason: Why the counter must not be used; ``None`` if it may be.
    """

    duration_s: float
    ticks: int = 0
    period_s: float | None = None
    jitter_s: float | None = None
    longest_s: float | None = None
    still_s: float | None = None
    continuous: bool = False
    ratio: float | None = None
    ratio_margin: float | None = None
    power_period_s: float | None = None
    power_changes: int = 0
    power_continuous: bool = False
    mean_w: float | None = None
    reason: str | None = None


class Reading(NamedTuple):
    """One poll: monotonic ns before and after it, J and W. ``None`` without a counter or a power sensor."""

    begin_ns: int
    end_ns: int
    energy_j: float | None
    watts: float | None

    @property
    def time_s(self) -> float:
        """The middle, in seconds."""
        return (self.begin_ns + self.end_ns) / 2e9


class _Tick(NamedTuple):
    """A move of the counter between two polls: index of the second poll, earliest and latest time."""

    at: int
    earliest_s: float
    latest_s: float

    @property
    def time_s(self) -> float:
        return (self.earliest_s + self.latest_s) / 2


def evaluate_readings(readings: Sequence[Reading], power_age_s: float = 0.1) -> CheckResult:
    """Evaluate the readings of one board, whose power readings may lag by ``power_age_s`` seconds.

    The counter is rejected if it differs from integrated power by more than ``DISAGREEMENT`` plus the
    uncertainty from sampling, which is, in joules,

        SIGMAS sd(d) √n  +  power_age_s (P_max - P_min)  +  P_mean (g_first + g_last) / 2

    where d are the n differences between counter and integral over spans of a few ticks. They scatter if
    power is not steady and the sensors sample at different times or only part of the time. The second term
    covers power readings that lag, so that the integral is of another stretch of time; the third covers the
    gaps g between the polls around the first and the last tick.
    """
    if len(readings) < 2:
        return CheckResult(duration_s=0.0)
    ticks = _ticks(readings, [reading.energy_j for reading in readings])
    changes = _ticks(readings, [reading.watts for reading in readings])
    poll_s = _poll_period_s(readings)
    watts = [reading.watts for reading in readings if reading.watts is not None]
    result = CheckResult(
        duration_s=(readings[-1].end_ns - readings[0].begin_ns) / 1e9,
        ticks=len(ticks),
        continuous=_continuous(ticks, readings),
        power_period_s=_typical(_gaps(changes), poll_s) if len(changes) > 2 else None,
        power_changes=len(changes),
        power_continuous=_continuous(changes, readings),
        mean_w=sum(watts) / len(watts) if watts else None,
    )
    if readings[0].energy_j is None:
        return result
    result = _timed(result, readings, ticks, poll_s)
    reason = _backwards(readings) or _standstill(result)
    if reason is None and len(ticks) < 2:
        reason = f"ticked {len(ticks)} times in {result.duration_s:.1f} s"
    if reason is not None:
        return msgspec.structs.replace(result, reason=reason)
    return _compare(result, readings, ticks, power_age_s)


def _ticks(readings: Sequence[Reading], values: Sequence[float | None]) -> list[_Tick]:
    return [
        _Tick(at, readings[at - 1].begin_ns / 1e9, readings[at].end_ns / 1e9)
        for at, (before, after) in enumerate(pairwise(values), start=1)
        if before != after and before is not None and after is not None
    ]


def _gaps(ticks: Sequence[_Tick]) -> list[float]:
    return [after.time_s - before.time_s for before, after in pairwise(ticks)]


def _continuous(ticks: Sequence[_Tick], readings: Sequence[Reading]) -> bool:
    return len(ticks) >= ENOUGH_TICKS and len(ticks) >= CONTINUOUS * (len(readings) - 1)


def _backwards(readings: Sequence[Reading]) -> str | None:
    energies = [reading.energy_j for reading in readings if reading.energy_j is not None]
    fall_j = max((before - after for before, after in pairwise(energies)), default=0.0)
    return f"went backwards by {_joules(fall_j)}" if fall_j > 0 else None


def _timed(
    result: CheckResult, readings: Sequence[Reading], ticks: Sequence[_Tick], poll_s: float
) -> CheckResult:
    starts = [0, *(tick.at for tick in ticks)]
    ends = [*(tick.at - 1 for tick in ticks), len(readings) - 1]
    # From the end of the first reading with a value to the start of the last one.
    still_s = max(
        (readings[end].begin_ns - readings[start].end_ns) / 1e9
        for start, end in zip(starts, ends, strict=True)
    )
    result = msgspec.structs.replace(result, still_s=still_s)
    gaps = _gaps(ticks)
    if not gaps:
        return result
    period_s = _typical(gaps, poll_s)
    jitter_s = median(abs(gap - period_s) for gap in gaps)
    return msgspec.structs.replace(result, period_s=period_s, jitter_s=jitter_s, longest_s=max(gaps))


def _poll_period_s(readings: Sequence[Reading]) -> float:
    return median(after.begin_ns - before.begin_ns for before, after in pairwise(readings)) / 1e9


def _typical(gaps: Sequence[float], poll_s: float) -> float:
    """Return the mean of the gaps that differ from the median by no more than jitter or the polling period.

    The median itself is a multiple of the polling period, and missed ticks bias the mean of all gaps.
    """
    middle_s = median_low(gaps)
    spread_s = median(abs(gap - middle_s) for gap in gaps)
    return fmean(gap for gap in gaps if abs(gap - middle_s) <= max(1.1 * poll_s, SIGMAS * spread_s))


def _standstill(result: CheckResult) -> str | None:
    if result.still_s is None or result.still_s < STANDSTILL_S:
        return None
    drew = f" while the board drew {result.mean_w:.0f} W" if result.mean_w else ""
    return f"stood still for {result.still_s:.1f} s{drew}"


def _compare(
    result: CheckResult, readings: Sequence[Reading], ticks: Sequence[_Tick], power_age_s: float
) -> CheckResult:
    spans = _spans(ticks)
    watts = [reading.watts for reading in readings if reading.watts is not None]
    if len(watts) < len(readings) or not any(watts) or len(spans) < 2:
        return result
    counted = [_energy(readings, after) - _energy(readings, before) for before, after in pairwise(spans)]
    power = _Integral([reading.time_s for reading in readings], watts)
    integrated = [power.until(after.time_s) - power.until(before.time_s) for before, after in pairwise(spans)]
    counter_j, power_j = sum(counted), sum(integrated)
    if power_j <= 0:
        return result
    differences = [one - other for one, other in zip(counted, integrated, strict=True)]
    scatter_j = stdev(differences) * len(differences) ** 0.5 if len(differences) > 1 else 0.0
    mean_w = power_j / (spans[-1].time_s - spans[0].time_s)
    edges_s = sum(tick.latest_s - tick.earliest_s for tick in (spans[0], spans[-1])) / 2
    margin_j = SIGMAS * scatter_j + power_age_s * (max(watts) - min(watts)) + mean_w * edges_s
    ratio = counter_j / power_j
    reason = None
    if abs(counter_j - power_j) > DISAGREEMENT * power_j + margin_j:
        both = f"counter reads {_joules(counter_j)}, integrated power {_joules(power_j)}"
        reason = f"{both} ({(ratio - 1) * 100:+.0f} %)"
    return msgspec.structs.replace(result, ratio=ratio, ratio_margin=margin_j / power_j, reason=reason)


def _spans(ticks: Sequence[_Tick]) -> list[_Tick]:
    """Return the first tick, then each tick that comes at least ``SPAN_S`` after the previous one kept."""
    borders = [ticks[0]]
    for tick in ticks:
        if tick.time_s - borders[-1].time_s >= SPAN_S:
            borders.append(tick)
    return borders


def _energy(readings: Sequence[Reading], tick: _Tick) -> float:
    energy_j = readings[tick.at].energy_j
    assert energy_j is not None
    return energy_j


class _Integral:
    """Joules since the first reading, by the trapezoidal rule."""

    def __init__(self, times_s: Sequence[float], watts: Sequence[float]) -> None:
        pairs = zip(pairwise(times_s), pairwise(watts), strict=True)
        areas = ((t1 - t0) * (p0 + p1) / 2 for (t0, t1), (p0, p1) in pairs)
        self._times_s, self._watts = times_s, watts
        self._energies_j = [0.0, *accumulate(areas)]

    def until(self, time_s: float) -> float:
        before = max(bisect_right(self._times_s, time_s) - 1, 0)
        return self._energies_j[before] + (time_s - self._times_s[before]) * self._watts[before]


def _joules(energy_j: float) -> str:
    return f"{energy_j:.0f} J" if energy_j >= 10 else f"{energy_j:.3g} J"


def check_counters(
    polls: Mapping[str, Poll], power_age_s: Mapping[str, float], longest_s: float = LONGEST_CHECK_S
) -> dict[str, CheckResult]:
    """Poll boards together and evaluate their readings. Takes one to ``longest_s`` seconds.

    Args:
        polls: Reader of each board, by UUID.
        power_age_s: How far the power readings of each board may lag (seconds), by UUID.
        longest_s: Time limit (seconds).
    """
    results: dict[str, CheckResult] = {}
    readings: dict[str, list[Reading]] = {name: [] for name in polls}
    begin_s = evaluated_s = real_time.monotonic()
    while len(results) < len(polls):
        for name in polls.keys() - results.keys():
            readings[name].append(_poll(polls[name]))
        now_s = real_time.monotonic()
        if now_s - begin_s < SHORTEST_CHECK_S or now_s - evaluated_s < EVALUATE_EVERY_S:
            real_time.sleep(CHECK_POLL_S)
            continue
        evaluated_s = now_s
        for name in polls.keys() - results.keys():
            result = evaluate_readings(readings[name], power_age_s[name])
            if now_s - begin_s > longest_s or is_settled(result):
                results[name] = result
    return results


def _poll(poll: Poll) -> Reading:
    begin_ns = real_time.monotonic_ns()
    energy_j, watts = poll()
    return Reading(begin_ns, real_time.monotonic_ns(), energy_j, watts)


def is_settled(result: CheckResult) -> bool:
    """Return whether more readings would not change the result."""
    if result.duration_s < SHORTEST_CHECK_S:
        return False
    if result.still_s is None or result.still_s >= STANDSTILL_S:
        return True
    if result.period_s is None or result.jitter_s is None:
        return False
    steady = result.jitter_s <= result.period_s / 10 + 2 * CHECK_POLL_S
    return result.ticks >= ENOUGH_TICKS and steady and (result.ratio_margin or 0.0) <= SMALL_MARGIN


class CheckedBoard(StoredStruct, frozen=True):
    """The board, driver, boot and version of this package that a result is valid for."""

    uuid: str
    driver: str
    boot: str
    sources: list[str]
    tool: str = __version__


class _Entry(StoredStruct, frozen=True):
    board: CheckedBoard
    result: CheckResult
    checked_s: float


class CheckCache:
    """Cache of results, one small file for each board. Problems with files never raise.

    The default ``directory`` is ``meters`` in ``LLENERGY_CACHE_DIR``, or in the platform's cache directory.
    """

    #: Results that could not be written, by path; only this process can use them. They belong to the class,
    #: since each test opens its meters, and with them a cache, anew.
    _unwritten: ClassVar[dict[Path, _Entry]] = {}

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory if directory is not None else cache_directory() / "meters"

    def load(self, board: CheckedBoard) -> CheckResult | None:
        """Return the result of an earlier check; ``None`` if it is missing, damaged or outdated."""
        path = self._path(board)
        entry = self._unwritten.get(path) or _read(path)
        if entry is None or entry.board != board:
            return None
        result, age_s = entry.result, time.time() - entry.checked_s
        # Without a counter, power is integrated, which needs the refresh period of the reading.
        is_empty = result.period_s is None and result.power_changes < ENOUGH_CHANGES
        provisional = is_empty or result.reason is not None or (result.ratio_margin or 0.0) > DISAGREEMENT
        return None if provisional and not 0 <= age_s <= PROVISIONAL_S else result

    def store(self, board: CheckedBoard, result: CheckResult) -> None:
        """Store a result, for other processes too if the directory is writable."""
        path = self._path(board)
        entry = _Entry(board=board, result=result, checked_s=time.time())
        try:
            _write(path, msgspec.json.encode(entry))
        except OSError:
            self._unwritten[path] = entry
        else:
            self._unwritten.pop(path, None)

    def _path(self, board: CheckedBoard) -> Path:
        return self._directory / f"nvml-{re.sub('[^A-Za-z0-9-]', '_', board.uuid)}.json"


def _read(path: Path) -> _Entry | None:
    try:
        return msgspec.json.decode(read_limited(path), type=_Entry)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, since other processes may read and write it."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    scratch = Path(name)
    os.close(descriptor)
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
