# SPDX-License-Identifier: Apache-2.0
"""Calls over a ``Link``: pytest's side, which calls, and the other one, which answers.

Messages are pickles: only a process that has proved the key, or that pytest has started, is at the other end.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.connection import Link, Message

CALL, RESULT, ERROR = "call", "result", "error"


class Pending:
    """A call whose result is awaited: begin several, on different hosts, before the first ``result``."""

    def __init__(self, peer: Peer, number: int, method: str) -> None:
        self._peer, self._number, self._method = peer, number, method
        #: The reply with its arrival, or why the other side was lost.
        self.replies: queue.SimpleQueue[tuple[Message, int] | str] = queue.SimpleQueue()
        self.sent_ns = time.monotonic_ns()
        self.received_ns = self.sent_ns

    def result(self, timeout_s: float) -> Any:
        """Return the result.

        Raises:
            WorkerError: There was none in time, the other side is lost, or an unexpected error there.
            LLEnergyError: The method raised an error of this package, whose class it keeps.
        """
        try:
            found = self.replies.get(timeout=timeout_s)
        except queue.Empty:
            self._peer.forget(self._number)
            raise WorkerError(
                f"{self._peer.name}: no answer to {self._method} within {timeout_s:g} s"
            ) from None
        if isinstance(found, str):
            raise WorkerError(found)
        (kind, _, *value), self.received_ns = found
        if kind == RESULT:
            return value[0]
        error_class, message, details = value
        found_class = getattr(errors, error_class, WorkerError)
        message = f"{self._peer.name}: {message}"
        raise found_class(message, details) if issubclass(found_class, WorkerError) else found_class(message)


class Peer:
    """The process at the other end of a connection, whose methods pytest calls by name.

    Args:
        connection: An authenticated connection, or one of a pair.
        name: What errors begin with.
        explain: Returns why it was lost, from what ``Link.run`` returns.
        local: See there.
    """

    def __init__(
        self, connection: Connection, name: str, explain: Callable[[str], str], *, local: bool = False
    ) -> None:
        self.name = name
        #: Called once it is lost, with the reason.
        self.on_lost: Callable[[str], object] = lambda _: None
        self._explain = explain
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self.link = Link(connection, self._receive)
        self._thread = threading.Thread(target=self._run, args=(local,), name=f"llenergy-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why it is lost, such as "n2: its agent has not answered for 3 s"; None if it is not."""
        return self._lost

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method, such as ``ranks.kill``. Each object serves one call at a time.

        Raises:
            Exception: The arguments cannot be sent. A lost process is reported by ``result``.
        """
        number = next(self._numbers)
        pending = Pending(self, number, method)
        with self._lock:
            if self._lost is not None:
                pending.replies.put(self._lost)
                return pending
            self._pending[number] = pending
        try:
            self.link.send((CALL, number, method, args, kwargs))
        except OSError:
            # The receiving thread finds out why, and answers.
            pass
        except BaseException:
            self.forget(number)
            raise
        return pending

    def call(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method; raises as ``begin`` and ``Pending.result`` do."""
        return self.begin(method, *args, **kwargs).result(timeout_s)

    def forget(self, number: int) -> None:
        """Ignore the reply to a call if it still comes."""
        with self._lock:
            self._pending.pop(number, None)

    def give_up(self, reason: str) -> None:
        """Treat it as lost from now on, for a reason that follows its name. It ends, if it still runs."""
        self._lose(f"{self.name}: {reason}")

    def close(self) -> None:
        """End the process, with everything that it runs."""
        self.on_lost = lambda _: None
        self._lose(f"{self.name}: its agent was ended")
        self._thread.join()

    def _run(self, local: bool) -> None:
        reason = self.link.run(local=local)
        if self._lost is None:
            self._lose(self._explain(reason))
        # Only now, so that whoever waits for a rank finds the reason.
        self.link.close()

    def _receive(self, message: Message, arrival_ns: int) -> None:
        with self._lock:
            pending = self._pending.pop(message[1], None)
        if pending is not None:
            pending.replies.put((message, arrival_ns))

    def _lose(self, reason: str) -> None:
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or reason
            left = list(self._pending.values())
            self._pending.clear()
        self.link.shut_down()
        for each in left:
            each.replies.put(self._lost)
        if first:
            self.on_lost(self._lost)


class Service:
    """Answers calls with the methods of objects by name, each made by the first call to it, in its thread.

    Errors of this package reach pytest with their class and message, all others as ``WorkerError`` with a
    traceback.
    """

    def __init__(self, factories: Mapping[str, Callable[[], Any]]) -> None:
        self._factories = factories
        self._threads = {name: ThreadPoolExecutor(1) for name in factories}
        #: In the order of ``factories``.
        self.objects: dict[str, Any] = {}

    def answer(self, link: Link, message: Message) -> None:
        """Let the thread of an object answer a call."""
        kind, number, method, args, kwargs = message
        if kind != CALL:
            raise ValueError(kind)
        name, _, verb = method.partition(".")
        if name in self._threads:
            self._threads[name].submit(self._answer, link, number, name, verb, args, kwargs)
        else:
            _reply(link, (ERROR, number, "WorkerError", f"its agent has no {method}", ""))

    def _answer(
        self, link: Link, number: int, name: str, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            if name not in self.objects:
                self.objects[name] = self._factories[name]()
            reply: Message = (RESULT, number, getattr(self.objects[name], verb)(*args, **kwargs))
        except BaseException as error:
            # Whatever a method raises, pytest waits for its reply.
            reply = _describe_error(number, error)
        _reply(link, reply)


def _reply(link: Link, reply: Message) -> None:
    # ``run`` finds out if the connection has ended.
    with suppress(OSError):
        try:
            link.send(reply)
        except OSError:
            raise
        except Exception as error:
            # The result cannot be sent, for example because it is too large.
            link.send(_describe_error(reply[1], error))


def _describe_error(number: int, error: BaseException) -> Message:
    name, message = type(error).__name__, ""
    # An error of a user's meter may have no text, or one that cannot be read.
    with suppress(Exception):
        message = str(error.args[0] if isinstance(error, errors.LLEnergyError) else error)
    if isinstance(error, errors.LLEnergyError):
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        details = str(error.details) if isinstance(error, WorkerError) else ""
        return (ERROR, number, known.__name__, message or name, details)
    message = ": ".join(filter(None, (name, message.partition("\n")[0])))
    return (ERROR, number, "", message, "".join(traceback.format_exception(error)))
