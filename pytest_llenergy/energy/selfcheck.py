# SPDX-License-Identifier: Apache-2.0
"""Self-check of an energy counter, once per board, driver and boot: is it usable, and when does it tick?

For a second or two the counter is polled together with the board's power. The readings give the period of the
ticks, and show whether the counter agrees with the integral of power over the same ticks. Counters that stand
still, run backwards or count half of the joules exist, and a single reading does not reveal them.

Results are cached, so that a board is checked once per driver, boot and version of this package.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from pytest_llenergy import __version__, real_time
from pytest_llenergy.energy.power_readings import ENOUGH_CHANGES
from pytest_llenergy.energy.timeouts import (
    CHECK_POLL_S,
    LONGEST_CHECK_S,
    SHORTEST_CHECK_S,
    STANDSTILL_S,
)
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import StoredStruct, cache_directory
from pytest_llenergy.record.files import replace_file

#: The largest difference from integrated power that the gains of two sensors explain (nvml.GAIN_LIMIT).
DISAGREEMENT = 0.05

#: Ticks after which the check may end before ``LONGEST_CHECK_S``.
ENOUGH_TICKS = 10

#: A counter that moves between at least this share of its readings moves all the time.
CONTINUOUS = 0.95

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


def evaluate_readings(readings: Sequence[Reading], power_age_s: float = 0.1) -> CheckResult:
    """Evaluate the readings of one board, whose power readings may lag by ``power_age_s`` seconds.

    The counter is rejected if it differs from integrated power by more than ``DISAGREEMENT`` plus the
    uncertainty from sampling: see ``_compare``.
    """
    import numpy as np

    if len(readings) < 2:
        return CheckResult(duration_s=0.0)
    begins_s, ends_s = (np.array([each[side] for each in readings]) / 1e9 for side in (0, 1))
    energies_j, watts = (np.array([each[what] for each in readings], dtype=float) for what in (2, 3))
    poll_s = float(np.median(np.diff(begins_s)))
    ticks, changes = _moves(energies_j), _moves(watts)
    # A counter or a reading moved in the middle between two polls.
    ticked_s, changed_s = ((begins_s[at - 1] + ends_s[at]) / 2 for at in (ticks, changes))
    known_w = watts[np.isfinite(watts)]
    result = CheckResult(
        duration_s=float(ends_s[-1] - begins_s[0]),
        ticks=len(ticks),
        continuous=_is_continuous(ticks, readings),
        power_period_s=_typical(np.diff(changed_s), poll_s) if len(changes) > 2 else None,
        power_changes=len(changes),
        power_continuous=_is_continuous(changes, readings),
        mean_w=float(known_w.mean()) if len(known_w) else None,
    )
    if readings[0].energy_j is None:
        return result
    # From the end of the first reading with a value to the start of the last one.
    starts, stops = np.append(0, ticks), np.append(ticks - 1, len(readings) - 1)
    still_s, gaps_s = float((begins_s[stops] - ends_s[starts]).max()), np.diff(ticked_s)
    period_s = _typical(gaps_s, poll_s) if len(gaps_s) else None
    fall_j = -float(np.nanmin(np.diff(energies_j)))
    reason = None
    if fall_j > 0:
        reason = f"went backwards by {_joules(fall_j)}"
    elif still_s >= STANDSTILL_S:
        drew = f" while the board drew {result.mean_w:.0f} W" if result.mean_w else ""
        reason = f"stood still for {still_s:.1f} s{drew}"
    elif len(ticks) < 2:
        reason = f"ticked {len(ticks)} times in {result.duration_s:.1f} s"
    result = msgspec.structs.replace(result, period_s=period_s, reason=reason)
    if reason is not None or not known_w.any():
        return result
    blurs_s = ends_s[ticks] - begins_s[ticks - 1]
    times_s = ((begins_s + ends_s) / 2)[np.isfinite(watts)]
    return _compare(result, (times_s, known_w), (ticked_s, energies_j[ticks], blurs_s), power_age_s)


def _moves(values: Any) -> Any:
    """Return the indices of the polls at which a value differs from that of the previous poll."""
    import numpy as np

    before, after = values[:-1], values[1:]
    return 1 + np.flatnonzero((before != after) & np.isfinite(before) & np.isfinite(after))


def _is_continuous(moves: Any, readings: Sequence[Reading]) -> bool:
    return len(moves) >= ENOUGH_TICKS and len(moves) >= CONTINUOUS * (len(readings) - 1)


def _typical(gaps_s: Any, poll_s: float) -> float:
    """Return the mean of the gaps that differ from the median by no more than jitter or the polling period.

    The median itself is a multiple of the polling period, and missed ticks bias the mean of all gaps.
    """
    import numpy as np

    middle_s = np.sort(gaps_s)[(len(gaps_s) - 1) // 2]
    off_s = abs(gaps_s - middle_s)
    return float(gaps_s[off_s <= max(1.1 * poll_s, SIGMAS * np.median(off_s))].mean())


def _compare(
    result: CheckResult, power: tuple[Any, Any], ticks: tuple[Any, Any, Any], power_age_s: float
) -> CheckResult:
    """Compare a counter with integrated power, from its first tick to its last one.

    Over a time T they may differ by SIGMAS sd(P) √(T power_age_s), since power readings lag by up to
    power_age_s, and may sample one moment in that time, and by P_mean g / 2 for the gap g between the polls
    around the first and the last tick.

    Args:
        result: The result so far.
        power: Times (s) and watts of the polls.
        ticks: Times (s) of the ticks, joules, and time between the polls around them (s).
        power_age_s: How far power readings may lag.
    """
    import numpy as np

    (times_s, watts), (ticked_s, energies_j, blurs_s) = power, ticks
    joules = np.append(0.0, np.cumsum(np.diff(times_s) * (watts[1:] + watts[:-1]) / 2))
    power_j = float(np.diff(np.interp(ticked_s[[0, -1]], times_s, joules))[0])
    if power_j <= 0:
        return result
    counter_j = float(energies_j[-1] - energies_j[0])
    span_s = ticked_s[-1] - ticked_s[0]
    edges_j = power_j / span_s * (blurs_s[0] + blurs_s[-1]) / 2
    margin_j = float(SIGMAS * watts.std() * (span_s * power_age_s) ** 0.5 + edges_j)
    ratio = counter_j / power_j
    reason = None
    if abs(counter_j - power_j) > DISAGREEMENT * power_j + margin_j:
        both = f"counter reads {_joules(counter_j)}, integrated power {_joules(power_j)}"
        reason = f"{both} ({(ratio - 1) * 100:+.0f} %)"
    return msgspec.structs.replace(result, ratio=ratio, ratio_margin=margin_j / power_j, reason=reason)


def _joules(energy_j: float) -> str:
    return f"{energy_j:.0f} J" if energy_j >= 10 else f"{energy_j:.3g} J"


def check_counters(polls: Mapping[str, Poll], power_age_s: Mapping[str, float]) -> dict[str, CheckResult]:
    """Poll boards together, until each has ticked ``ENOUGH_TICKS`` times, and evaluate their readings.

    Without a counter, changes of power count.
    """
    readings: dict[str, list[Reading]] = {name: [] for name in polls}
    shown: dict[str, float | None] = dict.fromkeys(polls)
    ticks, begin_s, elapsed_s = dict.fromkeys(polls, -1), real_time.monotonic(), 0.0
    while elapsed_s < SHORTEST_CHECK_S or (
        elapsed_s < LONGEST_CHECK_S and min(ticks.values()) < ENOUGH_TICKS
    ):
        for name, poll in polls.items():
            begin_ns = real_time.monotonic_ns()
            energy_j, watts = poll()
            readings[name].append(Reading(begin_ns, real_time.monotonic_ns(), energy_j, watts))
            before, shown[name] = shown[name], watts if energy_j is None else energy_j
            ticks[name] += before != shown[name]
        real_time.sleep(CHECK_POLL_S)
        elapsed_s = real_time.monotonic() - begin_s
    return {name: evaluate_readings(readings[name], power_age_s[name]) for name in polls}


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

    #: Results of this process, by path, for directories that cannot be written. They belong to the class,
    #: since each test opens its meters, and with them a cache, anew.
    _kept: ClassVar[dict[Path, _Entry]] = {}

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory if directory is not None else cache_directory() / "meters"

    def load(self, board: CheckedBoard) -> CheckResult | None:
        """Return the result of an earlier check; ``None`` if it is missing, damaged or outdated."""
        path = self._path(board)
        entry = self._kept.get(path) or _read(path)
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
        entry = self._kept[path] = _Entry(board=board, result=result, checked_s=time.time())
        with suppress(OSError, ReportError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, msgspec.json.encode(entry))

    def _path(self, board: CheckedBoard) -> Path:
        return self._directory / f"nvml-{re.sub('[^A-Za-z0-9-]', '_', board.uuid)}.json"


def _read(path: Path) -> _Entry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Entry)
    except (OSError, msgspec.DecodeError):
        return None
