# SPDX-License-Identifier: Apache-2.0
"""The program that does on another host what pytest asks. ``agent_command`` returns how to start it.

The main thread answers beats and reads the clock at once; each service has a thread of its own. The agent
ends itself and what its services have started when pytest has gone, when pytest is silent for three beats, on
SIGTERM, and when its launcher ends. A guard around it (``ranks.guard``) kills it with all its descendants
if it hangs, or is stopped, when the launcher ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from pytest_llenergy import errors
from pytest_llenergy.hosts import timeouts, wire
from pytest_llenergy.hosts.clock import read_suspended_ns
from pytest_llenergy.hosts.wire import Control, Hello, Invitation, WireCall, WireReply
from pytest_llenergy.ranks import guard

#: Not run with ``-m``, which would put another directory first on the search path. The package is that of
#: pytest, if this host has the same files; everything else is found as usual.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pytest_llenergy
sys.path[:] = [*filter(None, sys.path[1:]), sys.argv[1]]
from pytest_llenergy.hosts.agent import main
main(*sys.argv[2:])
"""

#: Services by the first part of their verbs: module and factory, imported by the first request. They are
#: closed in this order.
SERVICES: dict[str, str] = {
    "ranks": "pytest_llenergy.hosts.rank_service:RankService",
    "meters": "pytest_llenergy.hosts.meter_service:MeterService",
    "windows": "pytest_llenergy.hosts.meter_service:WindowService",
    "host": "pytest_llenergy.hosts.host_facts:HostService",
}


class Busy:
    """What the agent measures at present.

    Work that can wait runs while that is nothing, and holds ``condition`` meanwhile.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.measured: set[Hashable] = set()

    def begin(self, what: Hashable) -> None:
        """Wait for the end of work that is not measured, and let no more of it begin."""
        with self.condition:
            self.measured.add(what)

    def end(self, what: Hashable) -> None:
        """Allow such work again, if nothing else is measured."""
        with self.condition:
            self.measured.discard(what)
            self.condition.notify_all()


@dataclass(frozen=True)
class AgentContext:
    """What a service may know of its agent: its slot, what it measures, how to open connections to pytest."""

    slot: int
    invitation: Invitation
    busy: Busy = field(default_factory=Busy)

    def connect(self, hello: Hello) -> Connection:
        """Open another connection to pytest; raises as ``wire.connect`` does."""
        return wire.connect(self.invitation, hello)


class Service(Protocol):
    """A part of the agent. Its verbs are called by one thread, one after the other."""

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """Return functions by name. Arguments and results are primitives.

        A ``Future`` is answered once it is done; other verbs do not wait for it.
        Errors of this package reach pytest with their class and message, all others as ``WorkerError`` with a
        traceback.
        """

    def close(self) -> None:
        """End everything that it has started. May be called while a verb still runs in its thread."""


def agent_command(slot: int | str, python: str = sys.executable, invitation: str = "-") -> list[str]:
    """Return the command line of an agent, to be run in a session of its own.

    Args:
        slot: Position of its host in the gang, or an environment variable of the agent that contains it.
        python: Interpreter on its host.
        invitation: A file of mode 0600 with the invitation; "-" for the first line of the standard input.
    """
    return [python, "-c", PROGRAM, guard.PACKAGE_PARENT, str(slot), invitation]


class _Worker:
    """The thread of one service. The service is made by its first request."""

    def __init__(self, factory: str, context: AgentContext, send: Callable[[WireReply], None]) -> None:
        self._factory, self._context, self._send = factory, context, send
        self.requests: queue.SimpleQueue[WireCall] = queue.SimpleQueue()
        self._service: Service | None = None
        self._verbs: Mapping[str, Callable[..., Any]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def _run(self) -> None:
        while True:
            request = self.requests.get()
            self._answer(request.id, partial(self._call, request))

    def _call(self, request: WireCall) -> Any:
        if self._service is None:
            module, _, factory = self._factory.partition(":")
            self._service = getattr(import_module(module), factory)(self._context)
            self._verbs = self._service.verbs()
        verb = request.verb.partition(".")[2]
        if verb not in self._verbs:
            raise errors.WorkerError(f"its agent has no verb {request.verb}")
        return self._verbs[verb](**request.arguments)

    def _answer(self, number: int, compute: Callable[[], Any]) -> None:
        try:
            found = compute()
            if isinstance(found, Future):
                found.add_done_callback(lambda done: self._answer(number, done.result))
                return
            answer = WireReply(number, found)
        except BaseException as error:
            # Whatever a verb raises, pytest waits for its answer.
            answer = _describe_error(number, error)
        # The main thread finds out if the connection has ended.
        with suppress(OSError):
            try:
                self._send(answer)
            except OSError:
                raise
            except Exception as error:
                # The answer itself cannot be sent, for example because it is too large.
                self._send(_describe_error(number, error))


def _describe_error(number: int, error: BaseException) -> WireReply:
    name, message, details = type(error).__name__, "", ""
    # An error of a user's meter may have no text, or one that cannot be read.
    if isinstance(error, errors.LLEnergyError):
        with suppress(Exception):
            message = str(error.args[0])
        with suppress(Exception):
            details = str(error.details) if isinstance(error, errors.WorkerError) else ""
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return WireReply(number, error=message or name, error_class=known.__name__, details=details)
    with suppress(Exception):
        message = str(error).partition("\n")[0]
    message = ": ".join(filter(None, (name, message)))
    return WireReply(number, error=message, details="".join(traceback.format_exception(error)))


def serve(connection: Connection, context: AgentContext) -> NoReturn:
    """Serve pytest until it or the launcher has gone, then end the process."""
    control = Control(connection)
    workers = {name: _Worker(factory, context, control.send) for name, factory in SERVICES.items()}
    reason = "was asked to end"
    try:
        for _, message in control.receive(timeouts.FIRST_BEAT_S):
            if not isinstance(message, WireCall):
                raise errors.WorkerError("sent an answer")
            if message.verb == "clock":
                control.send(WireReply(message.id, [time.monotonic_ns(), read_suspended_ns()]))
                continue
            worker = workers.get(message.verb.partition(".")[0])
            if worker is None:
                control.send(WireReply(message.id, error=f"its agent has no service for {message.verb}"))
            else:
                worker.requests.put(message)
    except errors.WorkerError as error:
        reason = f"pytest {error}"
    except OSError as error:
        reason = f"pytest does not read what it asked for ({error.strerror or error})"
    except SystemExit:
        pass
    for number in guard.ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)
    control.shut_down()
    closer = threading.Thread(target=_close, args=(list(workers.values()),), daemon=True)
    closer.start()
    closer.join(timeouts.AGENT_CLOSE_TIMEOUT_S)
    _report(context.slot, reason)
    # Threads of services may hang.
    os._exit(0)


def _close(workers: list[_Worker]) -> None:
    for each in workers:
        with suppress(Exception):
            each.close()


def _report(slot: int, reason: str) -> None:
    with suppress(OSError):
        os.write(2, f"pytest-llenergy agent of slot {slot} ended: {reason}\n".encode(errors="replace"))


def main(slot: str, invitation: str) -> None:
    """Run an agent; see ``agent_command`` for the arguments."""
    with suppress(OSError):
        # Ctrl-C at a terminal is pytest's business.
        os.setsid()
    guard.fork_under_guard(os.getppid(), "", os.dup(0))
    for number in guard.ENDING_SIGNALS:
        signal.signal(number, _exit)
    position = int(slot if slot.isdigit() else os.environ[slot])
    try:
        text = sys.stdin.readline() if invitation == "-" else Path(invitation).read_text(encoding="ascii")
        sent = Invitation.decode(text)
        connection = wire.connect(sent, Hello("agent", position))
    except (errors.WorkerError, OSError, ValueError) as error:
        _report(position, str(error))
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # What has worked once is tried first and alone from now on.
    reached = msgspec.structs.replace(sent, addresses=(wire.peer_address(connection),))
    serve(connection, AgentContext(position, reached))


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)
