# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections between pytest and the agents of other hosts, and the messages on them.

Agents connect to pytest, never the other way round. Both sides prove that they know a secret before anything
else is read. What follows is neither encrypted nor signed: the network of a cluster is trusted to deliver
bytes, not to keep strangers out.
"""

from __future__ import annotations

import base64
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.meeting import list_own_addresses
from pytest_llenergy.ranks.transport import set_time_limit
from pytest_llenergy.record.environment import is_same_boot, read_boot_id

#: Largest hello and control message (bytes). Data of ranks has connections of its own.
MAX_HELLO_BYTES, MAX_MESSAGE_BYTES = 4096, 16 << 20

#: How many connections may wait for their authentication; the oldest gives way.
MAX_STRANGERS = 256


class Invitation(msgspec.Struct, frozen=True):
    """Where agents reach pytest, and the secret that proves that they were invited.

    Pass it by standard input or in a file of mode 0600: command lines and environments are visible to others.
    ``boot_id`` is that of pytest's host.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    boot_id: str

    def __repr__(self) -> str:
        # Tracebacks show the values of variables.
        return f"Invitation({', '.join(self.addresses)}, port {self.port})"

    def encode(self) -> str:
        """Return it as one line of text, without the line break."""
        return base64.b64encode(msgspec.json.encode(self)).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """Return the invitation from a line of text.

        Raises:
            WorkerError: The text is no invitation. The message does not show it: it may contain the secret.
        """
        try:
            return msgspec.json.decode(base64.b64decode(text.strip(), validate=True), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise WorkerError(f"an agent got {len(text)} characters that are not an invitation") from None


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a connection is for: ``agent`` for control messages, ``rank`` for the bytes of one rank.

    A slot is the position of an agent's host in its gang.
    """

    kind: str
    slot: int
    group: str = ""
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.rank if self.group else self.slot}"


class WireCall(msgspec.Struct, tag="request"):
    """From pytest: call a verb of a service, such as ``host.describe``. Arguments are primitives."""

    id: int
    verb: str
    arguments: dict[str, Any]


class WireReply(msgspec.Struct, tag="answer", omit_defaults=True):
    """From an agent: the value, or one line about the error, its class in ``errors`` and its traceback."""

    id: int
    ok: Any = None
    error: str | None = None
    error_class: str | None = None
    details: str = ""


class Beat(msgspec.Struct, tag="beat"):
    """From both sides, once a second."""

    number: int


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(WireCall | WireReply | Beat)


@contextmanager
def as_socket(connection: Connection) -> Iterator[socket.socket]:
    """Lend the socket of a connection, which stays open at the end of the block."""
    borrowed = socket.socket(fileno=connection.fileno())
    try:
        yield borrowed
    finally:
        borrowed.detach()


def shut_down(connection: Connection) -> None:
    """End a connection in both directions. Whoever waits for it, in any thread, finds it ended."""
    with suppress(OSError), as_socket(connection) as borrowed:
        borrowed.shutdown(socket.SHUT_RDWR)


def peer_address(connection: Connection) -> str:
    """Return the address of the other side."""
    with as_socket(connection) as borrowed:
        return str(borrowed.getpeername()[0])


class Listener:
    """Accepts the connections of agents on all interfaces. A stranger delays nobody and gets nothing.

    Raises:
        WorkerError: No port can be opened, or no network interface is up.
    """

    def __init__(self) -> None:
        addresses = tuple(list_own_addresses())
        if not addresses:
            raise WorkerError("no network interface is up; bring one up, as with 'ip link set lo up'")
        self._secret = os.urandom(32)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            raise WorkerError(f"no port for the agents of other hosts: {error.strerror or error}") from error
        self._server.setblocking(False)
        self._changed = threading.Condition()
        self._closed = False
        #: When each connection that is not authenticated yet was opened.
        self._strangers: dict[Connection, float] = {}
        self._arrived: dict[Hello, Connection] = {}
        port = int(self._server.getsockname()[1])
        self.invitation = Invitation(addresses, port, self._secret, read_boot_id())
        threading.Thread(target=self._serve, name="llenergy-listener", daemon=True).start()

    def accept(
        self, hello: Hello, timeout_s: float, explain: Callable[[], str | None] = lambda: None
    ) -> Connection:
        """Return the connection that began with this hello; see ``accept_first``."""
        return self.accept_first([hello], timeout_s, explain)[1]

    def accept_first(
        self, hellos: Collection[Hello], timeout_s: float, explain: Callable[[], str | None] = lambda: None
    ) -> tuple[Hello, Connection]:
        """Return the first connection that began with one of these hellos, once it has come.

        Args:
            hellos: How it may begin.
            timeout_s: Time limit (seconds).
            explain: Returns why it cannot come any more, for example since the launcher has ended.

        Raises:
            WorkerError: None has come in time, or can come.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not (arrived := [hello for hello in self._arrived if hello in hellos]):
                reason = explain()
                if reason is None and time.monotonic() > deadline_s:
                    reason = f"no connection of {', '.join(map(str, hellos))} within {timeout_s:g} s"
                if reason is not None:
                    raise WorkerError(reason)
                self._changed.wait(timeouts.EXPECT_POLL_S)
            return arrived[0], self._arrived.pop(arrived[0])

    def close(self) -> None:
        """Accept no more connections, and close those that nobody has asked for. The others stay open."""
        with self._changed:
            self._closed = True
            # Wakes the thread, which closes it.
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            for each in self._strangers:
                shut_down(each)
            while self._arrived:
                self._arrived.popitem()[1].close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        while True:
            poll.poll(timeouts.AUTHENTICATION_POLL_S * 1e3 if self._strangers else None)
            with self._changed:
                if self._closed:
                    self._server.close()
                    return
                self._drop_silent()
            try:
                opened, _ = self._server.accept()
                connection = _make_connection(opened)
            except BlockingIOError:
                continue
            except OSError:
                # The other side has gone, or this process has no descriptors left.
                time.sleep(timeouts.EXPECT_POLL_S)
                continue
            with self._changed:
                self._strangers[connection] = time.monotonic()
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _drop_silent(self) -> None:
        oldest_s = time.monotonic() - timeouts.AUTHENTICATION_TIMEOUT_S
        for number, (each, since_s) in enumerate(list(self._strangers.items())):
            if since_s < oldest_s or number < len(self._strangers) - MAX_STRANGERS:
                shut_down(each)

    def _admit(self, connection: Connection) -> None:
        hello = None
        # Whatever a stranger sends must only end its own connection.
        with suppress(Exception):
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            hello = msgspec.json.decode(connection.recv_bytes(MAX_HELLO_BYTES), type=Hello)
        with self._changed:
            del self._strangers[connection]
            if hello is None or self._closed:
                connection.close()
                return
            before = self._arrived.pop(hello, None)
            if before is not None:
                before.close()
            self._arrived[hello] = connection
            self._changed.notify_all()


def connect(
    invitation: Invitation, hello: Hello, timeout_s: float = timeouts.CONNECT_TIMEOUT_S
) -> Connection:
    """Return an authenticated connection to pytest, through whichever address answers first.

    Addresses that this host has too, such as that of the loopback interface or of a container bridge, are
    left out on other hosts than pytest's: another user of this host could wait there and pass on to pytest
    what proves the identity of this process.

    Raises:
        WorkerError: No address answers in time, none knows the secret, or pytest has ended: its host refuses.
    """
    deadline_s = time.monotonic() + timeout_s
    foreign = not is_same_boot(invitation.boot_id, read_boot_id())
    left_out = set(list_own_addresses()) if foreign else set()
    addresses = [address for address in invitation.addresses if address not in left_out]
    if not addresses:
        tried = ", ".join(invitation.addresses)
        raise WorkerError(f"every address of pytest's host is also one of this host ({tried})")
    reasons: dict[str, Exception] = {}
    while (left_s := deadline_s - time.monotonic()) > 0:
        found: queue.SimpleQueue[Connection | tuple[str, Exception]] = queue.SimpleQueue()
        decided = threading.Lock()
        for address in addresses:
            arguments = (invitation, address, left_s, found, decided)
            threading.Thread(target=_try_address, args=arguments, daemon=True).start()
        for _ in addresses:
            try:
                answer = found.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, Connection):
                with suppress(OSError):
                    answer.send_bytes(msgspec.json.encode(hello))
                    return answer
            else:
                reasons.update([answer])
        if any(isinstance(reason, ConnectionRefusedError) for reason in reasons.values()):
            break
        time.sleep(timeouts.CONNECT_RETRY_S)
    tried = "; ".join(f"{each}: {str(reasons.get(each) or '') or 'no answer'}" for each in addresses)
    raise WorkerError(f"pytest cannot be reached at port {invitation.port} ({tried})")


def _try_address(
    invitation: Invitation,
    address: str,
    timeout_s: float,
    found: queue.SimpleQueue[Connection | tuple[str, Exception]],
    decided: threading.Lock,
) -> None:
    """Report a connection, or an address and the reason; a later connection than the first is closed."""
    try:
        limit_s = min(timeout_s, timeouts.AUTHENTICATION_TIMEOUT_S)
        connection = _make_connection(socket.create_connection((address, invitation.port), limit_s))
        set_time_limit(connection, limit_s)
        answer_challenge(connection, invitation.secret)
        deliver_challenge(connection, invitation.secret)
        set_time_limit(connection, 0.0)
    except Exception as error:
        found.put((address, error))
        return
    if decided.acquire(blocking=False):
        found.put(connection)
    else:
        connection.close()


def _make_connection(opened: socket.socket) -> Connection:
    opened.setblocking(True)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(opened.detach())


class Control:
    """Either end of a control connection: messages with beats between them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        # A side that stops within a message must not block the other one.
        set_time_limit(connection, timeouts.MISSED_S)

    def send(self, message: WireCall | WireReply) -> None:
        """Send a message.

        Raises:
            TypeError: It contains something other than primitives.
            WorkerError: It is too large.
            OSError: The other side is gone, or does not read.
        """
        data = ENCODER.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise WorkerError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        with self._sending:
            try:
                self._connection.send_bytes(data)
            except OSError:
                # Perhaps half of it was sent.
                self.shut_down()
                raise

    def receive(self, first_s: float = timeouts.MISSED_S) -> Iterator[tuple[int, WireCall | WireReply]]:
        """Send beats, and yield messages with the moment of their arrival (monotonic nanoseconds).

        Args:
            first_s: How long the other side may be silent before its first message (seconds).

        Raises:
            WorkerError: The other side is gone. The message continues a sentence that begins with its name.
        """
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        number, heard_s = 0, time.monotonic()
        next_s, patience_s = heard_s, first_s
        try:
            while True:
                now_s = time.monotonic()
                if now_s >= next_s:
                    self._send_beat(number)
                    number, next_s = number + 1, now_s + timeouts.BEAT_S
                wake_s = min(next_s, heard_s + patience_s)
                readable = poll.poll(max(0.0, wake_s - now_s) * 1e3)
                arrival_ns = time.monotonic_ns()
                if readable:
                    message = DECODER.decode(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
                    heard_s, patience_s = time.monotonic(), timeouts.MISSED_S
                    if not isinstance(message, Beat):
                        yield arrival_ns, message
                elif time.monotonic() - heard_s >= patience_s:
                    raise TimeoutError
        except (TimeoutError, BlockingIOError):
            raise WorkerError(f"has not answered for {timeouts.MISSED_S:g} s") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WorkerError(f"sent something that is not a message ({error})") from None
        except (EOFError, OSError) as error:
            if str(error) == "bad message length":
                raise WorkerError("sent something that is not a message (its length is invalid)") from None
            raise WorkerError("has closed its connection") from None

    def shut_down(self) -> None:
        """End the connection: ``receive`` of both sides raises."""
        shut_down(self._connection)

    def close(self) -> None:
        """Close the connection, after ``receive`` has ended."""
        self._connection.close()

    def _send_beat(self, number: int) -> None:
        """Send a beat, unless the connection is full, or busy with a message, which serves as a beat."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLOUT)
        if poll.poll(0) and self._sending.acquire(blocking=False):
            try:
                self._connection.send_bytes(ENCODER.encode(Beat(number)))
            finally:
                self._sending.release()
