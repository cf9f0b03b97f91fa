# SPDX-License-Identifier: Apache-2.0
"""The meters of an agent's host, for rounds that pytest marks.

The traces of the counters stay here: a request names moments of this host's clock, and the answer has the
joules between them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import msgspec

from pytest_llenergy.errors import MeterError
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.meters.base import Targets
from pytest_llenergy.meters.select import MeterRegistry, Selection, open_meters
from pytest_llenergy.meters.window_meters import LocalWindows
from pytest_llenergy.model.timeline import Iteration, RankTimeline, Span, Timeline
from pytest_llenergy.workers.pickling import load_call

#: Methods of ``HostMeters`` that are verbs as they are.
METHODS = (
    "domains",
    "infos",
    "await_ticks",
    "tick_reference",
    "block_power",
    "required_round_s",
    "begin_gap",
    "begin_work",
    "end_work",
    "end_gap",
)


class RoundMoments(msgspec.Struct, frozen=True):
    """When a round, its quiet gaps and its phases began and ended, in nanoseconds of one host's clock.

    ``u_ns`` is the standard uncertainty of all of them from this clock, and ``marking_u_ns`` that from the clock of
    the host that marked them.
    """

    gap_start_ns: int
    start_ns: int
    end_ns: int
    gap_end_ns: int
    phases: list[tuple[str, int, int]]
    u_ns: float
    marking_u_ns: float

    def as_round(self) -> MeasuredRound:
        """Return a round with these moments and nothing else."""
        spans = tuple(Span(name=name, start_ns=start, end_ns=end) for name, start, end in self.phases)
        work = Iteration(start_ns=self.start_ns, end_ns=self.end_ns, spans=spans or None)
        timeline = Timeline(ranks=(RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0),))
        return MeasuredRound(
            timeline,
            self.gap_start_ns,
            self.gap_end_ns,
            clock_u_ns=self.u_ns,
            marking_u_ns=self.marking_u_ns,
        )


def open_here(
    boards: Sequence[str], names: Sequence[str], require_measured: bool, specs: Sequence[bytes]
) -> Selection:
    """Open the meters of these boards, of the CPU without boards, also those of ``dump_meters``."""
    extra = [load_call(io.BytesIO(each)) for each in specs]
    registry = MeterRegistry([make(*arguments) for make, arguments, _ in extra])
    return open_meters(names, registry, Targets(tuple(boards)), require_measured=require_measured)


class MeterService:
    """Verbs ``meters.*`` of an agent. ``open`` comes first, then ``start``, and ``close`` last."""

    def __init__(self, _context: object) -> None:
        self._selection: Selection | None = None
        self._boards: Sequence[str] = ()
        self._started: LocalMeters | None = None
        # How the counters are read at present, outside rounds.
        self._mode = ExitStack()

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            **{name: self._pass_on(name) for name in METHODS},
            "open": self._open,
            "start": self._start,
            "read_closely": lambda on: self._set_mode(self._meters.reading_closely() if on else None),
            "spare_work": lambda on: self._set_mode(self._meters.at_work() if on else None),
            "account": self._account,
            "power_steps": self._power_steps,
            "close": self.close,
        }

    def close(self) -> None:
        """Close the meters, if any are open."""
        self._mode.close()
        started, selection = self._started, self._selection
        self._started = self._selection = None
        if started is not None:
            started.__exit__()
        elif selection is not None:
            with suppress(Exception):
                selection.close()

    def _open(self, boards: Sequence[str], **arguments: Any) -> list[str]:
        """Open meters; see ``open_here``. Returns why some were not opened."""
        self.close()
        self._boards = boards
        self._selection = open_here(boards, **arguments)
        return list(self._selection.reasons)

    def _start(self) -> float | None:
        """Start the readings. Returns the load average before."""
        if self._selection is None:
            raise MeterError("no meter is open on this host")
        self._started = LocalMeters(self._selection, self._boards).__enter__()
        return self._started.load_average

    @property
    def _meters(self) -> LocalMeters:
        if self._started is None:
            raise MeterError("the meters of this host are closed")
        return self._started

    def _pass_on(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return msgspec.to_builtins(getattr(self._meters, name)(**arguments))

        return call

    def _set_mode(self, context: AbstractContextManager[None] | None) -> None:
        self._mode.close()
        if context is not None:
            self._mode.enter_context(context)

    def _account(self, moments: Any, trial: bool) -> Any:
        measured = msgspec.convert(moments, RoundMoments).as_round()
        return msgspec.to_builtins(self._meters.account(measured, trial=trial)())

    def _power_steps(self, moments: Any) -> Any:
        return msgspec.to_builtins(
            self._meters.power_steps(msgspec.convert(moments, RoundMoments).as_round())
        )


class WindowService:
    """Verbs ``windows.*`` of an agent, for the windows of ``energy_meter``. ``open`` comes first.

    They have meters of their own, since a window may contain rounds.
    """

    def __init__(self, _context: object) -> None:
        self._meters: LocalWindows | None = None

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            "open": self._open,
            "start": lambda: self._opened.start(),
            "infos": lambda: msgspec.to_builtins(self._opened.infos()),
            "prepare": lambda window: self._opened.prepare(window)(),
            "begin": lambda **moment: self._opened.begin(**moment),
            "end": lambda **moment: self._opened.end(**moment)(),
            "account": lambda **moments: msgspec.to_builtins(self._opened.account_window(**moments)()),
            "close": self.close,
        }

    def close(self) -> None:
        """Close the meters, if any are open."""
        meters, self._meters = self._meters, None
        if meters is not None:
            with suppress(Exception):
                meters.stop()

    @property
    def _opened(self) -> LocalWindows:
        if self._meters is None:
            raise MeterError("the meters of this host are closed")
        return self._meters

    def _open(self, **arguments: Any) -> list[str]:
        """Open meters; see ``open_here``. Returns why some were not opened."""
        self.close()
        selection = open_here(**arguments)
        self._meters = LocalWindows(selection)
        return list(selection.reasons)
