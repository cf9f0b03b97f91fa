# SPDX-License-Identifier: Apache-2.0
"""The meters of an agent's host, for rounds that pytest marks.

The traces of the counters stay here: a request names moments of this host's clock, and the answer has the
joules between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pytest_llenergy.energy.meters.base import Meter, MeterSpec, Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, Selection, open_meters
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import LLEnergyError, MeterError, WorkerError
from pytest_llenergy.hosts.agent import AgentContext, Busy
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.request_energy import RequestSpan
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.ranks.pickling import load_call
from pytest_llenergy.record.text import one_line
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Span, Timeline

#: Methods of ``HostMeters`` that are verbs as they are.
METHODS = (
    "domains",
    "infos",
    "await_ticks",
    "tick_reference",
    "block_power",
    "required_round_s",
    "begin_work",
    "end_work",
)

#: Interval of the checks for ticks after the end of a window, while nothing is measured (seconds).
EARLY_POLL_S = 0.02


class RoundMoments(msgspec.Struct, frozen=True):
    """When a round, its quiet gaps and its phases began and ended, in nanoseconds of one host's clock.

    ``u_ns`` is the standard uncertainty of all of them from this clock, and ``marking_u_ns`` that from the
    clock of the host that marked them. ``servers`` are the pids of a server on the host, and ``requests``
    share the energy of the round.
    """

    gap_start_ns: int
    start_ns: int
    end_ns: int
    gap_end_ns: int
    phases: list[tuple[str, int, int]]
    u_ns: float
    marking_u_ns: float
    servers: tuple[int, ...] = ()
    requests: tuple[RequestSpan, ...] = ()

    def as_round(self) -> MeasuredRound:
        """Return a round with these moments and nothing else."""
        spans = tuple(Span(name=name, start_ns=start, end_ns=end) for name, start, end in self.phases)
        work = Iteration(start_ns=self.start_ns, end_ns=self.end_ns, spans=spans or None)
        rank = RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0, servers=self.servers)
        return MeasuredRound(
            Timeline(ranks=(rank,)),
            self.gap_start_ns,
            self.gap_end_ns,
            clock_u_ns=self.u_ns,
            marking_u_ns=self.marking_u_ns,
            requests=self.requests,
        )


def open_here(
    boards: Sequence[str], names: Sequence[str], require_measured: bool, specs: Sequence[bytes]
) -> Selection:
    """Open the meters of these boards, of the CPU without boards, also those of ``dump_meters``."""
    extra = [load_call(each) for each in specs]
    registry = MeterRegistry([_fail_in_one_line(make(*arguments)) for make, arguments, _ in extra])
    return open_meters(names, registry, Targets(tuple(boards)), require_measured=require_measured)


def _fail_in_one_line(spec: MeterSpec) -> MeterSpec:
    """Return a meter of the user whose errors are not shown with the code of the agent."""

    def open_meter(*arguments: Any) -> Sequence[Meter]:
        try:
            return spec.open(*arguments)
        except LLEnergyError:
            raise
        except Exception as error:
            message = one_line(f"{spec.name}: {type(error).__name__}: {error}")
            raise WorkerError(message) from None

    return spec._replace(open=open_meter)


class MeterService:
    """Verbs ``meters.*`` of an agent. ``open`` comes first, then ``start``, and ``close`` last."""

    def __init__(self, context: AgentContext) -> None:
        self._busy = context.busy
        self._selection: Selection | None = None
        self._boards: Sequence[str] = ()
        self._started: LocalMeters | None = None
        # How the counters are read at present, outside rounds.
        self._mode = ExitStack()

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            **{name: self._pass_on(name) for name in METHODS},
            "begin_gap": self._begin_gap,
            "end_gap": self._end_gap,
            "open": self._open,
            "start": self._start,
            "read_closely": lambda on: self._set_mode(self._meters.reading_closely() if on else None),
            "spare_work": lambda on: self._set_mode(self._meters.at_work() if on else None),
            "longest_wait_s": lambda: self._meters.longest_wait_s(),
            "account": self._account,
            "close": self.close,
        }

    def close(self) -> None:
        """Close the meters, if any are open."""
        self._busy.end("round")
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

    def _begin_gap(self) -> None:
        self._busy.begin("round")
        self._meters.begin_gap()

    def _end_gap(self) -> int:
        try:
            return self._meters.end_gap()
        finally:
            self._busy.end("round")

    def _set_mode(self, context: AbstractContextManager[None] | None) -> None:
        self._mode.close()
        if context is not None:
            self._mode.enter_context(context)

    def _account(self, moments: Any) -> Any:
        measured = msgspec.convert(moments, RoundMoments).as_round()
        return msgspec.to_builtins(self._meters.account(measured)())


class _Ended(NamedTuple):
    """A window that has ended, and the function that computes its joules once the counters have ticked."""

    end_ns: int
    account: Callable[[], Any]
    answer: Future[Any]


class EarlyAccounts:
    """Computes the joules of windows soon after their end, but never while something is measured."""

    def __init__(self, busy: Busy, is_settled: Callable[[int], bool]) -> None:
        self._busy = busy
        self._is_settled = is_settled
        self._waiting: dict[int, _Ended] = {}
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, window: int, end_ns: int, account: Callable[[], Any]) -> Future[Any]:
        """Return the joules of a window, which ``account`` computes once the counters have ticked."""
        answer: Future[Any] = Future()
        with self._busy.condition:
            self._waiting[window] = _Ended(end_ns, account, answer)
            self._busy.condition.notify_all()
        return answer

    def drop(self, window: int) -> None:
        """Do not compute the joules of a window, unless that is already done."""
        with self._busy.condition:
            ended = self._waiting.pop(window, None)
        if ended is not None:
            ended.answer.cancel()

    def close(self) -> None:
        """Compute nothing more."""
        with self._busy.condition:
            self._closed = True
            self._busy.condition.notify_all()
        for window in list(self._waiting):
            self.drop(window)

    def _run(self) -> None:
        condition = self._busy.condition
        with condition:
            while not self._closed:
                if self._busy.measured or not self._waiting:
                    condition.wait()
                    continue
                settled = [each for each, ended in self._waiting.items() if self._is_settled(ended.end_ns)]
                if settled:
                    ended = self._waiting.pop(settled[0])
                    try:
                        ended.answer.set_result(ended.account())
                    except Exception as error:
                        ended.answer.set_exception(error)
                # Also lets a measurement begin between two of them.
                condition.wait(EARLY_POLL_S)


class WindowService:
    """Verbs ``windows.*`` of an agent, for the windows of ``energy_meter``. ``open`` comes first.

    They have meters of their own, since a window may contain rounds.
    """

    def __init__(self, context: AgentContext) -> None:
        self._busy = context.busy
        self._meters: LocalWindows | None = None
        self._early: EarlyAccounts | None = None
        self._begun: set[int] = set()

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            "open": self._open,
            "longest_wait_s": lambda: self._opened.longest_wait_s(),
            "start": lambda: self._opened.start()(),
            "infos": lambda: msgspec.to_builtins(self._opened.infos()),
            "approach": self._approach,
            "prepare": lambda window: self._opened.prepare(window)(),
            "begin": self._begin,
            "end": self._end,
            "account_early": self._account_early,
            "account": self._account,
            "close": self.close,
        }

    def close(self) -> None:
        """Close the meters, if any are open."""
        meters, self._meters = self._meters, None
        early, self._early = self._early, None
        if early is not None:
            early.close()
        for window in list(self._begun):
            self._leave(window)
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
        self._early = EarlyAccounts(self._busy, self._meters.is_settled)
        return list(selection.reasons)

    def _approach(self, window: int) -> None:
        self._begun.add(window)
        self._busy.begin(window)

    def _leave(self, window: int) -> None:
        self._begun.discard(window)
        self._busy.end(window)

    def _begin(self, window: int, *, at_work: bool, **moment: Any) -> None:
        self._opened.begin(window, at_work=at_work, **moment)
        if not at_work:
            # Other windows may begin and end within it.
            self._leave(window)

    def _end(self, window: int, *, at_work: bool) -> None:
        try:
            self._opened.end_work(window, at_work=at_work)()
        finally:
            self._leave(window)

    def _account_early(self, window: int, name: str, **moments: Any) -> Future[Any] | None:
        self._opened.mark_end(moments["end_ns"], name)
        if self._early is None:
            return None
        account = partial(self._opened.account_window, window, **moments)
        return self._early.add(window, moments["end_ns"], lambda: msgspec.to_builtins(account()()))

    def _account(self, window: int, **moments: Any) -> Any:
        if self._early is not None:
            self._early.drop(window)
        return msgspec.to_builtins(self._opened.account_window(window, **moments)())
