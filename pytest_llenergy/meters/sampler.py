# SPDX-License-Identifier: Apache-2.0
"""The background reader: one thread that reads every open meter at its own pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from pytest_llenergy.meters.protocol import Meter
from pytest_llenergy.meters.trace import Series


class Sampler:
    """Reads meters from ``__enter__`` to ``__exit__`` and keeps what they said in ``series``.

    The thread sleeps between readings; ``read_now`` reads at once from the calling thread, for edges
    in the process itself.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = meters
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llenergy-sampler", daemon=True)
        self._series = {
            id(meter): [Series(meter.name, domain) for domain in meter.domains] for meter in meters
        }

    @property
    def series(self) -> list[Series]:
        """One series a domain, in the order of the meters."""
        return [series for meter in self._meters for series in self._series[id(meter)]]

    def __enter__(self) -> Sampler:
        self.read_now()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        for meter in self._meters:
            meter.close()

    def read_now(self) -> int:
        """Read every meter once, from the calling thread. Returns the moment, monotonic nanoseconds."""
        moments = [self._read(meter) for meter in self._meters]
        return sum(moments) // len(moments) if moments else time.monotonic_ns()

    def _read(self, meter: Meter) -> int:
        with self._lock:
            start_ns = time.monotonic_ns()
            try:
                values = meter.read()
            except Exception as error:
                # Meters come from third parties too; one that breaks must not end the reading of the rest.
                values = [f"{meter.name}: {type(error).__name__}: {error}"] * len(meter.domains)
            middle_ns = (start_ns + time.monotonic_ns()) // 2
            for series, value in zip(self._series[id(meter)], values, strict=True):
                if isinstance(value, str):
                    series.fail(value)
                else:
                    series.add(middle_ns, value)
            return middle_ns

    def _run(self) -> None:
        due = {id(meter): time.monotonic() for meter in self._meters}
        while self._meters:
            now = time.monotonic()
            for meter in self._meters:
                if due[id(meter)] <= now:
                    self._read(meter)
                    due[id(meter)] = now + meter.poll_period_s
            if self._stop.wait(max(0.0, min(due.values()) - time.monotonic())):
                return
