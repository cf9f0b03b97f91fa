# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest, its supervisor and its ranks: pickles over pairs of sockets.

Standard library only: the supervisor imports this module. Sockets are of the class that no test replaces.
"""

from __future__ import annotations

import _socket
import select
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

#: Environment variable of a supervisor and all its descendants: its directory, which it removes at its end.
SUPERVISOR_VARIABLE = "LLENERGY_SUPERVISOR"


def connection_pair() -> tuple[Connection, Connection]:
    """Return two connected ends."""
    ours, theirs = _socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def wait(connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
    """Return the readable connections; empty at the time limit, or after some weeks: poll(2) takes no more.

    ``multiprocessing.connection.wait`` asks the clock, and never returns in a test that has stopped it.
    """
    by_number, poll = {each.fileno(): each for each in connections}, select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(min(timeout_s, 2e6) * 1e3)]


@contextmanager
def _as_socket(connection: Connection) -> Iterator[Any]:
    borrowed = _socket.socket(fileno=connection.fileno())
    try:
        yield borrowed
    finally:
        borrowed.detach()


def set_time_limit(connection: Connection, seconds: float) -> None:
    """Let a read or write fail if the other side stops within a message; 0 for no limit."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with _as_socket(connection) as borrowed:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            borrowed.setsockopt(socket.SOL_SOCKET, option, limit)


def send_with_files(connection: Connection, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message and copies of open files."""
    with _as_socket(connection) as borrowed:
        socket.send_fds(borrowed, [b"f"], list(descriptors))
    connection.send(message)


def receive_with_files(connection: Connection) -> tuple[Any, list[int]]:
    """Return the next message and its open files. Raises as ``Connection.recv`` does."""
    with _as_socket(connection) as borrowed:
        # At most 253 (SCM_MAX_FD, include/net/scm.h), which must not leak into programs started from here.
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        begin, descriptors, _, _ = socket.recv_fds(borrowed, 1, 253, flags)
    if not begin:
        raise EOFError
    return connection.recv(), descriptors
