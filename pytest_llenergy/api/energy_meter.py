# SPDX-License-Identifier: Apache-2.0
"""EnergyMeter, which the fixture ``energy_meter`` returns, and what both fixtures add to a record."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from pytest_llenergy.api.context import TestContext, open_window_meters
from pytest_llenergy.api.run import DISABLED, skip_disabled
from pytest_llenergy.measure.custom_metrics import make_metric
from pytest_llenergy.meters.window import Measuring, Window
from pytest_llenergy.model import record
from pytest_llenergy.model.base import Direction


class RecordedValues:
    """What a test adds to its record, through either fixture."""

    _context: TestContext

    @property
    def extra_info(self) -> dict[str, Any]:
        """Values that the test adds to its record: text, numbers, lists and dicts."""
        return self._context.draft.extra_info

    @extra_info.setter
    def extra_info(self, values: Mapping[str, Any]) -> None:
        self._context.draft.extra_info = dict(values)

    def metric(
        self,
        name: str,
        value: float | Sequence[float],
        *,
        unit: str = "",
        better: Direction,
        uncertainty: float | None = None,
    ) -> None:
        """Add a custom metric to the record, for columns, comparisons, gates and the history.

        A second call with the same name replaces the first.

        Args:
            name: Its name, which no built-in metric has.
            value: The value, or one for each round or item: the metric is then their mean.
            unit: Unit of the value, such as ``ms``.
            better: ``"less"`` or ``"more"``: the direction that is better.
            uncertainty: Standard uncertainty of a single value, in its unit; None if unknown.

        Raises:
            LLEnergyError: An argument is invalid, or a built-in metric has this name.
        """
        __tracebackhide__ = True
        made = make_metric(name, value, unit=unit, better=better, uncertainty=uncertainty)
        self._context.draft.custom[name] = made


class DisabledWindow(Window):
    """A window with ``--energy-disable``: without energy, and to ask for it skips the rest of the test."""

    @property
    def record(self) -> record.Window:
        return msgspec.structs.replace(super().record, reason=DISABLED, flags=[])

    def _value(self, name: str) -> NoReturn:
        skip_disabled()


class EnergyMeter(RecordedValues):
    """The fixture ``energy_meter``: measures stretches of a test.

    ``with energy_meter("load") as window:`` measures a window; so do ``async with``, and the pair
    ``energy_meter.begin("load")`` and ``energy_meter.end("load")``. Windows may nest and overlap. The meters
    stay open until the test ends.
    """

    def __init__(self, context: TestContext) -> None:
        self._context = context
        self._measuring: Measuring | None = None
        # The first windows may open in several threads.
        self._lock = threading.Lock()

    def __call__(self, name: str) -> Window:
        """Return a new window, a context manager.

        Args:
            name: Name of the window in the record.

        Raises:
            MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
        """
        return self._add(self._open().window(name))

    def begin(self, name: str) -> Window:
        """Begin a window; ``end`` with the same name closes it.

        Raises:
            MeterError: A window of that name is open, or requested meters are unavailable.
        """
        return self._add(self._open().begin(name))

    def end(self, name: str) -> Window:
        """End the window of that name.

        Returns:
            The window, with its energy in joules and its duration in seconds.

        Raises:
            MeterError: No window of that name is open.
        """
        return self._open().end(name)

    def close(self) -> None:
        """Stop reading and close the meters."""
        if self._measuring is not None:
            self._measuring.stop()

    def _open(self) -> Measuring:
        with self._lock:
            if self._measuring is None:
                if self._context.settings.disable:
                    measuring = Measuring((), DisabledWindow)
                else:
                    measuring = Measuring(open_window_meters(self._context))
                try:
                    measuring.start()
                    self._context.draft.meters = measuring.infos()
                except BaseException:
                    # What stopping raises must not hide this error.
                    with suppress(Exception):
                        measuring.stop()
                    raise
                self._measuring = measuring
            return self._measuring

    def _add(self, window: Window) -> Window:
        self._context.draft.windows.append(window)
        return window
