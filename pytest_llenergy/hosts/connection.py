# SPDX-License-Identifier: Apache-2.0
"""The one connection between pytest and the agent of a host.

Agents connect to pytest over the launcher's network. Both sides prove that they know the key of the gang
before anything else is read; what follows belongs to that connection. It carries calls and replies (see
``peer``), beats, and the bytes of ranks, which cross unread.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import psutil

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.ranks.transport import connection_pair, set_time_limit

#: Largest message, and how many bytes of a rank one message carries at most.
MAX_MESSAGE_BYTES, CHUNK_BYTES = 16 << 20, 32 << 10

#: Longest wait that poll accepts, for ends without beats (seconds).
LONGEST_POLL_S = 3600.0

#: Kinds of messages, besides calls and replies. An agent begins with a hello: its slot and ``HostFacts``.
HELLO, BEAT, BYTES = "hello", "beat", "bytes"

Message = tuple[Any, ...]
"""Its kind first."""


@dataclass(frozen=True)
class Invitation:
    """Where agents reach pytest, and the key that proves that they were invited.

    Pass it by standard input: command lines and environments are visible to others. ``nice`` is the niceness
    of pytest, whose ranks must not be slower elsewhere.
    """

    addresses: tuple[str, ...]
    port: int
    #: Not in the text of tracebacks.
    key: bytes = field(repr=False)
    nice: int = 0

    def encode(self) -> str:
        """Return it as one line of text, without the line break."""
        fields = [self.addresses, self.port, self.key.hex(), self.nice]
        return base64.b64encode(json.dumps(fields).encode()).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """Return the invitation from a line of text; raises ``ValueError``, without the text."""
        try:
            addresses, port, key, nice = json.loads(base64.b64decode(text.strip(), validate=True))
            return cls(tuple(addresses), int(port), bytes.fromhex(key), int(nice))
        except (ValueError, TypeError):
            raise ValueError(f"an agent got {len(text)} characters that are not an invitation") from None


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host: fast interfaces first, loopback last."""
    states = psutil.net_if_stats()
    found = [
        (each.address.startswith("127."), -states[name].speed, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        # Link-local addresses are valid on one link only.
        if each.family == socket.AF_INET and name in states and states[name].isup
        if not each.address.startswith("169.254.")
    ]
    return list(dict.fromkeys(each[-1] for each in sorted(found)))


class Listener:
    """Accepts the agents of one gang; raises ``WorkerError`` if it can open no port."""

    def __init__(self) -> None:
        key = os.urandom(32)
        try:
            self._server = socket.create_server(("", 0), backlog=1024)
        except OSError as error:
            raise WorkerError(f"no port for the agents of other hosts: {error.strerror or error}") from error
        port = int(self._server.getsockname()[1])
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.invitation = Invitation(tuple(own_addresses()), port, key, nice)

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
            deliver_challenge(connection, self.invitation.key)
            answer_challenge(connection, self.invitation.key)
        except Exception:
            connection.close()
            return None
        return connection

    def close(self) -> None:
        """Accept no more connections; those that were accepted stay."""
        self._server.close()


def connect(invitation: Invitation, first: str | None = None) -> Connection:
    """Return a connection to pytest, by the first address that answers; ``first`` is tried before the others.

    Raises:
        WorkerError: None answers, or none knows the key.
    """
    reasons = []
    for address in dict.fromkeys([*filter(None, [first]), *invitation.addresses]):
        try:
            reached = socket.create_connection((address, invitation.port), timeouts.REACH_TIMEOUT_S)
            connection = _make_connection(reached)
            set_time_limit(connection, timeouts.AGENT_HANDSHAKE_TIMEOUT_S)
            answer_challenge(connection, invitation.key)
            deliver_challenge(connection, invitation.key)
        except Exception as error:
            reasons.append(f"{address}: {error}")
        else:
            return connection
    raise WorkerError(f"pytest cannot be reached at port {invitation.port} ({'; '.join(reasons)})")


def end_addresses(connection: Connection) -> tuple[str, str]:
    """Return the addresses of this and of the other side."""
    with _as_socket(connection) as borrowed:
        return str(borrowed.getsockname()[0]), str(borrowed.getpeername()[0])


def interface_to(address: str) -> str | None:
    """Return the interface of this host that packets to an address leave by; its own for an own address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return name
    # The whole network 127.0.0.0/8 is the loopback interface's.
    return "lo" if own.startswith("127.") else None


def free_ports(count: int) -> list[int]:
    """Return ports of this host that are free now."""
    probes = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in probes]
    for each in probes:
        each.close()
    return ports


class _Channel:
    """The bytes of one rank: this side's end of the socket, and what it has not taken yet."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.waiting = bytearray()
        self.ended = False


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
        self._fd = connection.fileno()
        self._sending = threading.Lock()
        #: Held while channels come and go.
        self._lock = threading.Lock()
        self._closed = False
        #: Whether the other side did not read what was sent.
        self._is_stuck = False
        self._channels: dict[int, _Channel] = {}
        self._by_fd: dict[int, _Channel] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        # A side that stops within a message must not block the other one.
        set_time_limit(connection, timeouts.MISSED_S)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            WorkerError: It is too large.
            OSError: The other side is gone, or does not read.
            Exception: It cannot be pickled.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_MESSAGE_BYTES:
            raise WorkerError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        with self._sending:
            try:
                self._connection.send_bytes(data)
            except OSError as error:
                # Perhaps half of it was sent.
                self._is_stuck = isinstance(error, BlockingIOError)
                self.shut_down()
                raise

    def run(self, first_s: float | None = None, *, local: bool = False) -> str:
        """Serve the connection to its end. Returns what the other side did: the end of a sentence.

        ``first_s`` is how long the other side may be silent at first (seconds). Between ``local`` processes
        there are no beats: an end is noticed, and a process that imports Ray is silent for long.
        """
        heard_s = time.monotonic()
        echo_s = math.inf if local else heard_s
        beat_s = math.inf if local or self._echoes else heard_s
        patience_s = math.inf if local else timeouts.MISSED_S if first_s is None else first_s
        try:
            while True:
                now_s = time.monotonic()
                if now_s >= beat_s:
                    self._send_if_free((BEAT,))
                    beat_s = now_s + timeouts.BEAT_S
                next_s = min(beat_s, heard_s + patience_s)
                events = self._epoll.poll(min(max(0.0, next_s - now_s), LONGEST_POLL_S))
                arrival_ns = time.monotonic_ns()
                for fd, event in events:
                    if fd != self._fd:
                        self._forward(fd, event)
                        continue
                    message = pickle.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
                    heard_s, patience_s = time.monotonic(), math.inf if local else timeouts.MISSED_S
                    if message[0] == BYTES:
                        self._deliver(*message[1:])
                    elif message[0] != BEAT:
                        self._on_message(message, arrival_ns)
                    if self._echoes and heard_s >= echo_s:
                        # Not only to beats: a side that sends much data has no room for any.
                        self._send_if_free((BEAT,))
                        echo_s = heard_s + timeouts.BEAT_S / 2
                if all(fd != self._fd for fd, _ in events) and time.monotonic() - heard_s >= patience_s:
                    raise TimeoutError
        except (EOFError, OSError) as error:
            if self._is_stuck or isinstance(error, (TimeoutError, BlockingIOError)):
                return f"has not answered for {timeouts.MISSED_S:g} s"
            return "has closed its connection"
        except Exception as error:
            return f"sent something that is not a message ({type(error).__name__}: {error})"

    def open_channel(self, number: int) -> Connection:
        """Return a connection to the rank with this channel on the other side."""
        ours, theirs = connection_pair()
        self.attach(number, theirs)
        return ours

    def attach(self, number: int, connection: Connection) -> None:
        """Pass the bytes of a rank on, until one side closes the connection."""
        channel = _Channel(number, connection)
        os.set_blocking(connection.fileno(), False)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._channels[number] = self._by_fd[connection.fileno()] = channel
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def shut_down(self) -> None:
        """End the connection: ``run`` of both sides returns."""
        with suppress(OSError), _as_socket(self._connection) as borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close everything, after ``run`` has ended: whoever waits for a rank finds it ended."""
        with self._lock:
            self._closed = True
            for each in self._channels.values():
                each.connection.close()
            self._channels.clear()
            self._by_fd.clear()
        self._epoll.close()
        # A thread that is sending ends first: the connection was shut down.
        with self._sending:
            self._connection.close()

    def _forward(self, fd: int, event: int) -> None:
        """Send what a rank has written, and give it what it could not take before."""
        channel = self._by_fd.get(fd)
        if channel is None:
            return
        if event & select.EPOLLOUT:
            self._flush(channel)
        if not event & ~select.EPOLLOUT or channel.number not in self._channels:
            return
        if not self._can_send():
            # This thread must go on to read: otherwise both sides could wait for each other.
            time.sleep(timeouts.FULL_PAUSE_S)
            return
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.send((BYTES, channel.number, data))
        if not data:
            self._drop(channel)

    def _deliver(self, number: int, data: bytes) -> None:
        """Give a rank what the other side has sent; nothing more comes after an empty message."""
        channel = self._channels.get(number)
        if channel is not None:
            channel.waiting += data
            channel.ended = not data
            self._flush(channel)

    def _flush(self, channel: _Channel) -> None:
        fd = channel.connection.fileno()
        try:
            while channel.waiting:
                del channel.waiting[: os.write(fd, channel.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            channel.waiting.clear()
        if channel.ended and not channel.waiting:
            self._drop(channel)
        else:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if channel.waiting else 0))

    def _drop(self, channel: _Channel) -> None:
        with self._lock:
            if self._channels.pop(channel.number, None) is not None:
                self._by_fd.pop(channel.connection.fileno())
                self._epoll.unregister(channel.connection.fileno())
                channel.connection.close()

    def _can_send(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0)) and not self._sending.locked()

    def _send_if_free(self, message: Message) -> None:
        """Send a message, unless the connection is full or busy with another one, which serves as a beat."""
        if self._can_send():
            self.send(message)


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
