# SPDX-License-Identifier: Apache-2.0
"""The meters of an agent's host. Their traces stay here: only moments and energies cross to pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, Selection, open_meters
from pytest_llenergy.energy.trace import Trace
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import MeterError
from pytest_llenergy.measure.local_meters import LocalMeters


class RoundMeters:
    """Answers the calls ``rounds.*`` with the methods of ``LocalMeters``; ``open`` comes first.

    A function that a method returns is called at once.
    """

    def __init__(self, _link: Any) -> None:
        self._opened: Any = None
        # How the counters are read at present, outside rounds.
        self._mode = ExitStack()
        self._end = ExitStack()

    def open(
        self, host: str, boards: Sequence[str], names: Sequence[str], require_measured: bool
    ) -> Sequence[str]:
        """Open the meters of these boards, of the CPU without boards. Returns why some were not opened.

        The names of domains begin with that of the host.
        """
        self.close()
        targets = Targets(tuple(boards))
        selection = open_meters(names, MeterRegistry(), targets, require_measured=require_measured)
        self._end.callback(selection.close)
        self._opened, trace = self._make(selection, boards)
        for series in trace:
            series.domain = series.domain._replace(name=f"{host}/{series.domain.name}")
        return selection.reasons

    def start(self) -> float | None:
        """Start the readings. Returns the load average before, if known."""
        self._opened.__enter__()
        self._end.pop_all()
        self._end.callback(self._opened.__exit__)
        load_average: float | None = self._opened.load_average
        return load_average

    def set_mode(self, name: str | None) -> None:
        """Read in this way outside rounds, such as ``at_work``; None for the usual one."""
        self._mode.close()
        if name is not None:
            self._mode.enter_context(getattr(self._opened, name)())

    def close(self) -> None:
        """Close the meters, if any are open."""
        self._opened = None
        with suppress(Exception):
            self._mode.close()
        with suppress(Exception):
            self._end.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self._opened is None:
            raise MeterError("the meters of this host are closed")
        method = getattr(self._opened, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return found() if callable(found) else found

        return call

    def _make(self, selection: Selection, boards: Sequence[str]) -> tuple[Any, Trace]:
        opened = LocalMeters(selection, boards)
        return opened, opened.trace


class WindowMeters(RoundMeters):
    """Answers the calls ``windows.*``. A window may contain rounds, so it has meters of its own."""

    def start(self) -> None:
        """Start the readings, and wait for the first tick of every counter."""
        self._opened.start()()
        self._end.pop_all()
        self._end.callback(self._opened.stop)

    def _make(self, selection: Selection, _boards: Sequence[str]) -> tuple[Any, Trace]:
        opened = LocalWindows(selection)
        return opened, opened.series
