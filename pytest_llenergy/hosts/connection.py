# SPDX-License-Identifier: Apache-2.0
"""The one connection between pytest and the agent of a host.

Agents connect to pytest over the launcher's network. Both sides prove that they know the key of the gang
before anything else is read; what follows belongs to that connection. It carries calls and replies (see
``peer``), beats, and the bytes of ranks, which cross unread.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.ranks.transport import connection_pair, set_time_limit

#: How many bytes of a rank one message carries at most: beats are not held up, whatever ranks send.
CHUNK_BYTES = 32 << 10

#: Kinds of messages, besides calls and replies. An agent begins with a hello: its slot and ``HostFacts``.
HELLO, BEAT, BYTES = "hello", "beat", "bytes"

Message = tuple[Any, ...]
"""Its kind first."""


class Invitation(NamedTuple):
    """Where agents reach pytest, and the key that proves that they were invited: a line of JSON.

    Pass it by standard input: command lines and environments are visible to others. Without an ``address``,
    the launcher tells each agent one. ``nice`` is the niceness of pytest.
    """

    address: str
    port: int
    key: str
    nice: int


class Listener:
    """Accepts the agents of one gang, which reach it at an ``address``; raises ``OSError`` without a port."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._server = socket.create_server(("", 0), backlog=1024)
        port = int(self._server.getsockname()[1])
        self._key = os.urandom(32).hex()
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.invitation: str = json.dumps(Invitation(address, port, self._key, nice))

    def accept(self, timeout_s: float) -> Connection | None:
        """Return the next connection whose other side knows the key; None if none has come in time.

        A stranger costs the time limit of the handshake.
        """
        try:
            self._server.settimeout(timeout_s)
            connection = _make_connection(self._server.accept()[0])
        except OSError:
            return None
        # Whatever a stranger sends must only end its own connection.
        try:
            set_time_limit(connection, timeouts.HANDSHAKE_TIMEOUT_S)
            deliver_challenge(connection, self._key.encode())
            answer_challenge(connection, self._key.encode())
        except Exception:
            connection.close()
            return None
        return connection

    def close(self) -> None:
        """Accept no more connections; those that were accepted stay."""
        self._server.close()


def connect(invitation: Invitation) -> Connection:
    """Return a connection to pytest; raises ``WorkerError`` if it does not answer, or lacks the key."""
    address = (invitation.address, invitation.port)
    try:
        connection = _make_connection(socket.create_connection(address, timeouts.REACH_TIMEOUT_S))
        set_time_limit(connection, timeouts.AGENT_HANDSHAKE_TIMEOUT_S)
        answer_challenge(connection, invitation.key.encode())
        deliver_challenge(connection, invitation.key.encode())
    except Exception as error:  # whatever answers there need not be pytest
        raise WorkerError(f"pytest cannot be reached at {address[0]}:{address[1]}: {error}") from None
    return connection


def end_addresses(connection: Connection) -> tuple[str, str]:
    """Return the addresses of this and of the other side."""
    with _as_socket(connection) as borrowed:
        return str(borrowed.getsockname()[0]), str(borrowed.getpeername()[0])


class _Channel:
    """The bytes of one rank. A thread for each direction: what one end does not take delays nothing else."""

    def __init__(self, link: Link, number: int, connection: Connection) -> None:
        self._link, self._number, self._connection = link, number, connection
        #: What the other side has sent; nothing comes after an empty message.
        self.arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def start(self) -> None:
        for work in (self._send, self._deliver):
            threading.Thread(target=work, name="llenergy-rank", daemon=True).start()

    def _send(self) -> None:
        data = b"begin"
        # If the link has ended, nobody waits for the rest.
        with suppress(OSError):
            while data:
                data = b""
                with suppress(OSError):
                    data = os.read(self._connection.fileno(), CHUNK_BYTES)
                self._link.send((BYTES, self._number, data))

    def _deliver(self) -> None:
        # If the rank has ended, nobody waits for the rest.
        with suppress(OSError):
            while data := self.arrived.get():
                while data:
                    data = data[os.write(self._connection.fileno(), data) :]
        # Not closed, which the other thread would not notice. With the last of both the descriptor goes.
        _shut_down(self._connection)
        self._link.channels.pop(self._number, None)


class Link:
    """Either end of the connection. ``run`` serves it; any thread may ``send``.

    Args:
        connection: An authenticated connection, or one of a pair.
        on_message: Gets each call and reply, and when it arrived (monotonic nanoseconds).
        echoes: Whether beats only answer what the other side sends, so that this one wakes up half as often.
    """

    def __init__(
        self, connection: Connection, on_message: Callable[[Message, int], object], *, echoes: bool = False
    ) -> None:
        self._connection, self._on_message, self._echoes = connection, on_message, echoes
        self._sending = threading.Lock()
        #: Ranks whose bytes cross.
        self.channels: dict[int, _Channel] = {}
        #: Whether the other side did not read what was sent.
        self._is_stuck = False
        # A side that stops within a message must not block the other one.
        set_time_limit(connection, timeouts.MISSED_S)

    def send(self, message: Message) -> None:
        """Send a message; raises ``OSError`` if the other side is gone, or does not read."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            try:
                self._connection.send_bytes(data)
            except OSError as error:
                # Perhaps half of it was sent.
                self._is_stuck = isinstance(error, BlockingIOError)
                self.shut_down()
                raise

    def run(self) -> str:
        """Serve the connection to its end. Returns what the other side did: the end of a sentence.

        This thread only reads. Otherwise both sides could wait for each other to do so.
        """
        heard_s = echo_s = beat_s = time.monotonic()
        # Not ``connection.wait``, whose set-up would be part of every reading of the clocks.
        incoming = select.poll()
        incoming.register(self._connection.fileno(), select.POLLIN)
        try:
            while True:
                now_s = time.monotonic()
                if not self._echoes and now_s >= beat_s:
                    self._send_beat()
                    beat_s = now_s + timeouts.BEAT_S
                next_s = heard_s + timeouts.MISSED_S
                wait_s = (next_s if self._echoes else min(beat_s, next_s)) - now_s
                if not incoming.poll(max(0.0, wait_s) * 1e3):
                    if time.monotonic() >= next_s:
                        raise TimeoutError
                    continue
                arrival_ns = time.monotonic_ns()
                message = pickle.loads(self._connection.recv_bytes())
                heard_s = time.monotonic()
                if message[0] == BYTES:
                    # None if a rank has not started, of which pytest has not heard yet.
                    if (channel := self.channels.get(message[1])) is not None:
                        channel.arrived.put(message[2])
                elif message[0] != BEAT:
                    self._on_message(message, arrival_ns)
                if self._echoes and heard_s >= echo_s:
                    # Not only to beats: a side that sends much data has no room for any.
                    self._send_beat()
                    echo_s = heard_s + timeouts.BEAT_S / 2
        except (EOFError, OSError) as error:
            if self._is_stuck or isinstance(error, (TimeoutError, BlockingIOError)):
                return f"has not answered for {timeouts.MISSED_S:g} s"
            return "has closed its connection"
        except Exception as error:  # bytes that another version of a class cannot read
            return f"sent something that is not a message ({type(error).__name__}: {error})"
        finally:
            self.shut_down()

    def open_channel(self, number: int) -> Connection:
        """Return a connection to the rank with this channel on the other side."""
        ours, theirs = connection_pair()
        self.attach(number, theirs)
        return ours

    def attach(self, number: int, connection: Connection) -> None:
        """Pass the bytes of a rank on, until one side closes the connection."""
        self.channels[number] = channel = _Channel(self, number, connection)
        channel.start()

    def shut_down(self) -> None:
        """End the connection: ``run`` of both sides returns."""
        _shut_down(self._connection)

    def close(self) -> None:
        """Close everything, after ``run`` has ended: whoever waits for a rank finds it ended."""
        for each in list(self.channels.values()):
            each.arrived.put(b"")
        # A thread that is sending ends first: the connection was shut down.
        with self._sending:
            self._connection.close()

    def _send_beat(self) -> None:
        """Send a beat, unless the connection is full or busy with a message, which serves as one."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLOUT)
        if poll.poll(0) and not self._sending.locked():
            self.send((BEAT,))


def _shut_down(connection: Connection) -> None:
    with suppress(OSError), _as_socket(connection) as borrowed:
        borrowed.shutdown(socket.SHUT_RDWR)


@contextmanager
def _as_socket(connection: Connection) -> Iterator[socket.socket]:
    borrowed = socket.socket(fileno=connection.fileno())
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _make_connection(opened: socket.socket) -> Connection:
    opened.setblocking(True)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(opened.detach())
