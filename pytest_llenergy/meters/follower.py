# SPDX-License-Identifier: Apache-2.0
"""Follows one meter: asks it, takes down what it says, and knows when to ask again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pytest_llenergy.meters.pace import Pace
from pytest_llenergy.meters.protocol import Meter
from pytest_llenergy.meters.trace import Series

#: A reading that comes later than this after it was due is noted (nanoseconds).
LATE_NS = 50_000_000

#: Power that was not read for so long (nanoseconds), or for so many of its periods if that is longer, is not
#: known, and no reading makes up for it.
UNREAD_NS, UNREAD_PERIODS = 80_000_000, 1.5

#: Readings that are kept before they are looked at, even while the work goes on.
MOST_NOTED = 256


class Answer(NamedTuple):
    """What a meter said between two moments."""

    begin_ns: int
    end_ns: int
    values: Sequence[object]


class Follower:
    """One open meter: what it said, and when it is due again."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.meter = meter
        self._clock = clock
        self.series: list[Series] = [Series(meter.name, domain) for domain in meter.domains]
        self.pace: Pace = Pace(self.series, meter.poll_period_s)
        self.due_ns: int = 0
        self.asked_ns: int | None = None
        self.always_fresh: bool = all(each.domain.max_age_s is not None for each in self.series)
        self._put_off = False
        self.noted: list[tuple[int, Answer]] = []

    def read(self, put_off_to_ns: int = 0, sparing: bool = False) -> None:
        """Read once. It was not to be read before ``put_off_to_ns``, though it may have been due."""
        answer = self._ask()
        self.catch_up()
        self._take(answer, put_off_to_ns, sparing)

    def note(self, planned_ns: int) -> None:
        """Read once, as was planned, and work out later what it says: that costs more than to ask."""
        self.noted.append((planned_ns, self._ask()))
        if len(self.noted) >= MOST_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Work out what was noted."""
        noted, self.noted = self.noted, []
        for planned_ns, answer in noted:
            self._take(answer, planned_ns, sparing=True)

    def _ask(self) -> Answer:
        begin_ns = self.asked_ns = self._clock()
        values: Sequence[object]
        try:
            values = self.meter.read()
        except Exception as error:
            # Meters come from third parties too; one that breaks must not end the reading of the rest.
            values = [f"{self.meter.name}: {type(error).__name__}: {error}"] * len(self.series)
        self.asked_ns = None
        return Answer(begin_ns, self._clock(), values)

    def _take(self, answer: Answer, put_off_to_ns: int, sparing: bool) -> None:
        put_off, self._put_off = self._put_off, put_off_to_ns > self.due_ns
        due_ns = max(self.due_ns or answer.begin_ns, put_off_to_ns)
        for series, value in zip(self.series, self._checked(answer.values), strict=True):
            # Either nobody came to read, or the answer took that long.
            if answer.end_ns - due_ns > LATE_NS:
                series.late.append((due_ns, answer.end_ns))
                if series.domain.integrated and answer.end_ns - due_ns > _longest_unread_ns(series):
                    told = f"the power of {series.domain.name} was not read for"
                    series.miss(
                        due_ns, answer.end_ns, f"{self.meter.name}: {told} {_ms(answer.end_ns - due_ns)}"
                    )
            if isinstance(value, str):
                series.fail(answer.begin_ns, value)
            else:
                series.add(answer.begin_ns, answer.end_ns, value)
        self.due_ns = self.pace.next_ns(answer.end_ns, put_off or self._put_off, sparing)
        self._narrow()

    def _narrow(self) -> None:
        """Where readings were put off, the timetable knows better than they do when a counter ticked."""
        if len(self.series) == 1 and self.series[0].ticks:
            ticks = self.series[0].ticks
            ticks[-1] = self.pace.narrowed(ticks[-1])

    def _checked(self, values: Sequence[object]) -> list[float | str]:
        if not isinstance(values, Sequence) or len(values) != len(self.series):
            told = len(values) if isinstance(values, Sequence) else repr(values)
            reason = f"{self.meter.name}: it read {told} values for {len(self.series)} domains"
            return [reason] * len(self.series)
        return [_checked(self.meter, value) for value in values]


def _longest_unread_ns(series: Series) -> float:
    return max(UNREAD_NS, UNREAD_PERIODS * (series.domain.update_period_s or 0.0) * 1e9)


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.0f} ms"


def _checked(meter: Meter, value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return f"{meter.name}: it read {value!r}, which is no number of joules"
