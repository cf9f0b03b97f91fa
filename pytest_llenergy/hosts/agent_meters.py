# SPDX-License-Identifier: Apache-2.0
"""The meters of an agent's host. Their traces stay here: only moments and energies cross to pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pytest_llenergy.energy.meters.base import Meter, MeterSpec, Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, Selection, open_meters
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import LLEnergyError, MeterError, WorkerError
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.ranks.pickling import load_call
from pytest_llenergy.record.text import one_line


class AgentMeters:
    """Answers the calls ``rounds.*`` or ``windows.*`` of an agent; ``open`` comes first.

    What is not a method here is one of the opened meters. A function that it returns is called at once.
    """

    def __init__(self, make: Callable[[Selection, Sequence[str]], Any]) -> None:
        self._make = make
        self._opened: Any = None
        # How the counters are read at present, outside rounds.
        self._mode = ExitStack()
        self._end = ExitStack()

    def open(
        self, boards: Sequence[str], names: Sequence[str], require_measured: bool, specs: Sequence[bytes]
    ) -> Sequence[str]:
        """Open the meters of these boards, of the CPU without boards, also those of ``dump_meters``.

        Returns why some were not opened.
        """
        self.close()
        extra = [load_call(each) for each in specs]
        registry = MeterRegistry([_fail_in_one_line(make(*arguments)) for make, arguments, _ in extra])
        selection = open_meters(names, registry, Targets(tuple(boards)), require_measured=require_measured)
        self._opened = self._make(selection, boards)
        self._end.callback(getattr(self._opened, "stop", selection.close))
        return selection.reasons

    def enter(self) -> float | None:
        """Start the readings of rounds. Returns the load average before."""
        opened = self._opened
        opened.__enter__()
        self._end.pop_all()
        self._end.callback(opened.__exit__)
        load_average: float | None = opened.load_average
        return load_average

    def set_mode(self, name: str | None) -> None:
        """Read in this way outside rounds, such as ``reading_closely``; None for the usual one."""
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


def open_rounds(_link: Any) -> AgentMeters:
    """Return what answers the calls ``rounds.*``."""
    return AgentMeters(LocalMeters)


def open_windows(_link: Any) -> AgentMeters:
    """Return what answers the calls ``windows.*``. A window may contain rounds, so it has its own meters."""
    return AgentMeters(lambda selection, _boards: LocalWindows(selection))


def _fail_in_one_line(spec: MeterSpec) -> MeterSpec:
    """Return a meter of the user whose errors are not shown with the code of the agent."""

    def open_meter(*arguments: Any) -> Sequence[Meter]:
        try:
            return spec.open(*arguments)
        except LLEnergyError:
            raise
        except Exception as error:  # code of the user, which may raise anything
            message = one_line(f"{spec.name}: {type(error).__name__}: {error}")
            raise WorkerError(message) from None

    return spec._replace(open=open_meter)
