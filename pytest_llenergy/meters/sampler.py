# SPDX-License-Identifier: Apache-2.0
"""The background reader: one thread that reads every open meter at its own pace."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from pytest_llenergy.meters.pace import Pace
from pytest_llenergy.meters.protocol import Meter
from pytest_llenergy.meters.trace import Series

#: Longest sleep, so that the thread ends soon after it is told to (seconds).
LONGEST_SLEEP_S = 0.05

#: Meters due within this time of one another are read in one go (nanoseconds).
TOGETHER_NS = 300_000

#: A reading that comes later than this after it was due is noted (nanoseconds).
LATE_NS = 50_000_000


#: Periods of a counter by which a tick may be late.
SLOW_TICKS = 1.5


#: How long a reading is waited for before it counts as one that will not come (seconds).
HANGING_S = 5.0


class _Source:
    """One open meter with what it has said."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.series = [Series(meter.name, domain) for domain in meter.domains]
        self.pace = Pace(self.series, meter.poll_period_s)
        self.due_ns = 0
        self.always_fresh = all(each.domain.max_age_s is not None for each in self.series)

    def read(self) -> None:
        """Read once."""
        begin_ns = time.monotonic_ns()
        try:
            values = [_checked(self.meter, value) for value in self.meter.read()]
            if len(values) != len(self.series):
                raise ValueError(f"{len(values)} values for {len(self.series)} domains")
        except Exception as error:
            # Meters come from third parties too; one that breaks must not end the reading of the rest.
            values = [f"{self.meter.name}: {type(error).__name__}: {error}"] * len(self.series)
        end_ns = time.monotonic_ns()
        due_ns = self.due_ns or begin_ns
        for series, value in zip(self.series, values, strict=True):
            # Either nobody came to read, or the answer took that long.
            if end_ns - due_ns > LATE_NS:
                series.late.append((due_ns, end_ns))
            if isinstance(value, str):
                series.fail(begin_ns, value)
            else:
                series.add(begin_ns, end_ns, value)
        self.due_ns = self.pace.next_ns(end_ns)


def _checked(meter: Meter, value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return f"{meter.name}: it read {value!r}, which is no number of joules"


class Sampler:
    """Reads meters from ``__enter__`` to ``__exit__`` and keeps what they said in ``series``.

    The thread sleeps between readings; ``read_now`` reads at once from the calling thread, for edges
    in the process itself.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._sources = [_Source(meter) for meter in meters]
        self._edges = [each for each in self._sources if each.always_fresh]
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="llenergy-sampler", daemon=True)

    @property
    def series(self) -> list[Series]:
        """One series a domain, in the order of the meters."""
        return [series for source in self._sources for series in source.series]

    def __enter__(self) -> Sampler:
        for source in self._sources:
            source.read()
        self._start_ns = time.monotonic_ns()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._thread.join(HANGING_S)
        if not self._thread.is_alive():
            # A driver that never answers must not keep the program from its end.
            for source in self._sources:
                source.meter.close()

    def read_now(self) -> None:
        """Read every meter that is never old, from the calling thread.

        A counter that stands still between its ticks would say nothing new.
        """
        if not self._edges or not self._lock.acquire(timeout=HANGING_S):
            return
        try:
            for source in self._edges:
                source.read()
        finally:
            self._lock.release()

    def await_ticks(self, after_ns: int, timeout_s: float, ticks: int = 1) -> None:
        """Sleep until every counter has ticked so often after a moment, or the time for it is over.

        Counters that are known to tick slowly have longer.
        """
        slowest_s = max(
            ((SLOW_TICKS + ticks) * (s.period_s or 0.0) + s.domain.smear_s for s in self.series), default=0.0
        )
        patience_s = timeout_s + slowest_s
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            # One that has stood still for as long already is not waited for again.
            stale_ns = time.monotonic_ns() - round(patience_s * 1e9)
            if all(
                series.settled(after_ns, ticks) or series.latest_ns(self._start_ns) < stale_ns
                for series in self.series
            ):
                return
            time.sleep(0.002)

    def _run(self) -> None:
        while self._sources and not self._stopping:
            now_ns = time.monotonic_ns()
            with self._lock:
                for source in self._sources:
                    if source.due_ns <= now_ns + TOGETHER_NS:
                        source.read()
            wait_s = (min(source.due_ns for source in self._sources) - time.monotonic_ns()) / 1e9
            if wait_s > 0:
                time.sleep(min(wait_s, LONGEST_SLEEP_S))
