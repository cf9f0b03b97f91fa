# SPDX-License-Identifier: Apache-2.0
"""Calls over a ``Link``: pytest's side, which calls, and the agent's, which answers.

Messages are pickles: only a process that has proved the key is at the other end.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.connection import Link, Message

CALL, RESULT, ERROR = "call", "result", "error"


class Pending(Future[Any]):
    """A call whose result is awaited: begin several, on different hosts, before the first ``result``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.sent_ns = self.received_ns = time.monotonic_ns()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result.

        Raises:
            WorkerError: There was none in time, the host is lost, or an unexpected error there.
            LLEnergyError: The method raised an error of this package, whose class it keeps.
        """
        try:
            return super().result(timeout)
        except FutureTimeoutError:
            raise WorkerError(f"{self._name}: no answer within {timeout} s") from None


class Peer:
    """The agent at the other end of an authenticated connection, whose methods pytest calls by name."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self.link = Link(connection, self._receive)
        self._thread = threading.Thread(target=self._run, name=f"llenergy-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why it is lost, such as "n2: its agent has not answered for 3 s"; None if it is not."""
        return self._lost

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method, such as ``ranks.kill``. Each object serves one call at a time.

        A lost host is reported by the result.
        """
        number, pending = next(self._numbers), Pending(self.name)
        with self._lock:
            if self._lost is not None:
                pending.set_exception(WorkerError(self._lost))
                return pending
            self._pending[number] = pending
        # If the connection has ended, the receiving thread finds out why, and answers.
        with suppress(OSError):
            pending.sent_ns = time.monotonic_ns()
            self.link.send((CALL, number, method, args, kwargs))
        return pending

    def call(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method; raises as ``begin`` and ``Pending.result`` do."""
        return self.begin(method, *args, **kwargs).result(timeout_s)

    def close(self) -> None:
        """End the agent, with everything that it runs."""
        self._lose("was ended")
        self._thread.join()

    def _run(self) -> None:
        self._lose(self.link.run())
        # Only now, so that whoever waits for a rank finds the reason.
        self.link.close()

    def _receive(self, message: Message, arrival_ns: int) -> None:
        kind, number, *value = message
        with self._lock:
            pending = self._pending.pop(number)
        pending.received_ns = arrival_ns
        if kind == RESULT:
            pending.set_result(value[0])
            return
        name, text, details = value
        found_class, text = getattr(errors, name, WorkerError), f"{self.name}: {text}"
        is_worker = issubclass(found_class, WorkerError)
        pending.set_exception(found_class(text, details) if is_worker else found_class(text))

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or f"{self.name}: its agent {reason}"
            left = list(self._pending.values())
            self._pending.clear()
        self.link.shut_down()
        for each in left:
            each.set_exception(WorkerError(self._lost))


class Service:
    """Answers calls with the methods of objects, each made by the first call to it, in its own thread.

    Errors of this package reach pytest with their class and message, all others as ``WorkerError`` with a
    traceback.

    Args:
        classes: Module and class of each object, by the first part of the names of its methods.
    """

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = classes
        self._threads = {name: ThreadPoolExecutor(1) for name in classes}
        self._objects: dict[str, Any] = {}

    def answer(self, link: Link, message: Message) -> None:
        """Let the thread of an object answer a call."""
        name = message[2].partition(".")[0]
        self._threads[name].submit(self._answer, link, *message[1:])

    def close(self) -> None:
        """Close the objects in the order of their classes, whatever they are doing."""
        for name in self._classes:
            if name in self._objects:
                with suppress(Exception):
                    self._objects[name].close()

    def _answer(
        self, link: Link, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name, _, verb = method.partition(".")
        # If the connection has ended, ``run`` finds out.
        with suppress(OSError):
            try:
                if name not in self._objects:
                    module, _, made = self._classes[name].partition(":")
                    self._objects[name] = getattr(import_module(module), made)(link)
                link.send((RESULT, number, getattr(self._objects[name], verb)(*args, **kwargs)))
            except BaseException as error:
                # Whatever a method raises or returns, pytest waits for its reply.
                link.send(_describe_error(number, error))


def _describe_error(number: int, error: BaseException) -> Message:
    if isinstance(error, errors.LLEnergyError):
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        details = error.details if isinstance(error, WorkerError) else ""
        return (ERROR, number, known.__name__, str(error.args[0] if error.args else known.__name__), details)
    message = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (ERROR, number, "", message, "".join(traceback.format_exception(error)))
