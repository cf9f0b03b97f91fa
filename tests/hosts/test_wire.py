# SPDX-License-Identifier: Apache-2.0
"""Connections of agents, and of strangers: real sockets, without agents."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts, wire
from pytest_llenergy.hosts.wire import Control, Hello, Invitation, Listener, WireCall, connect

AGENT = Hello("agent", 0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener."""
    opened = Listener()
    yield opened
    opened.close()


def knock(listener: Listener) -> socket.socket:
    """Open a connection as a stranger."""
    return socket.create_connection(("127.0.0.1", listener.invitation.port))


def is_closed(stranger: socket.socket, timeout_s: float) -> bool:
    """Return whether the other side closes the connection in time, whatever it sends before."""
    stranger.settimeout(timeout_s)
    try:
        while stranger.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_an_invitation_is_one_line_of_text(listener: Listener) -> None:
    text = listener.invitation.encode()
    assert text.isascii()
    assert text.split() == [text]
    assert Invitation.decode(f"{text}\n") == listener.invitation
    assert len(listener.invitation.secret) == 32
    assert repr(listener.invitation.secret) not in repr(listener.invitation)
    assert listener.invitation.secret != Listener().invitation.secret


@pytest.mark.parametrize("text", ["", "hello", "aGVsbG8=", "\udcff", "e30="])
def test_what_is_not_an_invitation_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(WorkerError) as caught:
        Invitation.decode(text)
    assert str(caught.value) == f"an agent got {len(text)} characters that are not an invitation"


def test_connections_are_told_apart_by_their_hello(listener: Listener) -> None:
    hellos = [AGENT, Hello("agent", 1), Hello("rank", 1, "group", 3), Hello("rank", 1, "group", 2)]
    opened = {hello: connect(listener.invitation, hello) for hello in hellos}
    for hello in reversed(hellos):
        accepted = listener.accept(hello, 60.0)
        opened[hello].send(hello.rank)
        assert accepted.recv() == hello.rank


def test_a_connection_that_does_not_come_is_an_error(listener: Listener) -> None:
    with pytest.raises(WorkerError, match=r"^no connection of rank 2 within 0\.1 s$"):
        listener.accept(Hello("rank", 0, "group", 2), 0.1)
    with pytest.raises(WorkerError, match=r"^srun has ended$"):
        listener.accept(AGENT, 60.0, lambda: "srun has ended")


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def test_a_stranger_without_the_secret_gets_nothing(listener: Listener, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    with knock(listener) as stranger:
        connection = Connection(os.dup(stranger.fileno()))
        assert connection.poll(60)
        challenge = connection.recv_bytes()
        assert challenge.startswith(b"#CHALLENGE#")
        connection.send_bytes(bomb)
        assert is_closed(stranger, 60)
    with knock(listener) as stranger:
        connection = Connection(os.dup(stranger.fileno()))
        with pytest.raises(Exception, match="digest sent was rejected"):
            answer_challenge(connection, b"another secret")
        assert is_closed(stranger, 60)
    with pytest.raises(WorkerError):
        listener.accept(AGENT, 0.2)
    assert not (tmp_path / "exploded").exists()


def test_a_stranger_that_asks_for_a_proof_first_gets_none(listener: Listener) -> None:
    with knock(listener) as stranger:
        connection = Connection(os.dup(stranger.fileno()))
        with pytest.raises(Exception, match="digest received was wrong"):
            # Sends a challenge of its own and takes that of the listener for the answer.
            deliver_challenge(connection, b"another secret")


def test_an_agent_sends_nothing_to_a_listener_without_the_secret(listener: Listener) -> None:
    wrong = msgspec.structs.replace(listener.invitation, secret=b"another secret")
    with pytest.raises(WorkerError, match=r"^pytest cannot be reached at port \d+ \(.*digest .* rejected"):
        connect(wrong, AGENT, 0.5)


@pytest.mark.parametrize("hello", [b"{}", b"[1]", b"\xff", b'{"kind":"agent","slot":"x"}', b"x" * 5000])
def test_an_invalid_hello_ends_its_connection_only(listener: Listener, hello: bytes) -> None:
    with knock(listener) as opened:
        connection = Connection(os.dup(opened.fileno()))
        answer_challenge(connection, listener.invitation.secret)
        deliver_challenge(connection, listener.invitation.secret)
        connection.send_bytes(hello)
        assert is_closed(opened, 60)
    connect(listener.invitation, AGENT)
    listener.accept(AGENT, 60.0)


def test_silent_strangers_delay_nobody_and_are_dropped(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "AUTHENTICATION_TIMEOUT_S", 1.0)
    with ExitStack() as end:
        strangers = [end.enter_context(knock(listener)) for _ in range(20)]
        # Begins a message.
        strangers[0].sendall(b"\0")
        connect(listener.invitation, AGENT)
        listener.accept(AGENT, 60.0)
        assert all(is_closed(each, 60.0) for each in strangers)


def test_more_strangers_than_may_wait_give_way_to_an_agent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_STRANGERS", 10)
    before = threading.active_count()
    with ExitStack() as end:
        strangers = [end.enter_context(knock(listener)) for _ in range(100)]
        connect(listener.invitation, AGENT)
        listener.accept(AGENT, 60.0)
        assert is_closed(strangers[0], 60.0)
        assert threading.active_count() - before < 60


def test_an_agent_of_another_host_leaves_out_addresses_that_are_its_own(listener: Listener) -> None:
    impostor = socket.create_server(("127.0.0.1", 0))
    impostor.setblocking(False)
    elsewhere = msgspec.structs.replace(
        listener.invitation, boot_id="another", port=impostor.getsockname()[1], addresses=("127.0.0.1",)
    )
    with pytest.raises(
        WorkerError, match=r"every address of pytest's host is also one of this host \(127\.0\.0\.1\)"
    ):
        connect(elsewhere, AGENT)
    with pytest.raises(BlockingIOError):
        impostor.accept()
    impostor.close()


def test_one_address_that_answers_is_enough(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first swallows packets (RFC 5737).
    addresses = ("192.0.2.1", "127.0.0.1")
    monkeypatch.setattr(timeouts, "AUTHENTICATION_TIMEOUT_S", 120.0)
    begin_s = time.monotonic()
    connect(msgspec.structs.replace(listener.invitation, addresses=addresses), AGENT, 120.0)
    listener.accept(AGENT, 60.0)
    assert time.monotonic() - begin_s < 60


def test_a_closed_listener_accepts_nobody(listener: Listener) -> None:
    connect(listener.invitation, AGENT)
    kept = connect(listener.invitation, Hello("agent", 1))
    accepted = listener.accept(Hello("agent", 1), 60.0)
    listener.close()
    # At once: this is what an agent finds when pytest was killed before it has connected.
    with pytest.raises(WorkerError, match=r"cannot be reached .*127\.0\.0\.1: .*refused"):
        connect(listener.invitation, AGENT, 3600.0)
    accepted.send("still open")
    assert kept.recv() == "still open"


def pair(listener: Listener) -> tuple[Control, Connection]:
    """Return a control connection and its other end."""
    theirs = connect(listener.invitation, AGENT)
    return Control(listener.accept(AGENT, 60.0)), theirs


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\0\4nope", "sent something that is not a message"),
        (b"\x7f\xff\xff\xff", "sent something that is not a message (its length is invalid)"),
        (b"GET / HTTP/1.1\r\n\r\n", "sent something that is not a message (its length is invalid)"),
        (b"\0\0\0\x0e\x83\xa4type\xa7request", "sent something that is not a message"),
    ],
)
def test_garbage_ends_a_control_connection(listener: Listener, data: bytes, message: str) -> None:
    control, theirs = pair(listener)
    os.write(theirs.fileno(), data)
    with pytest.raises(WorkerError) as caught:
        next(control.receive())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("part", [b"", b"\0", b"\0\0\0\4no"])
def test_three_missed_beats_end_a_control_connection(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(timeouts, "BEAT_S", 0.2)
    monkeypatch.setattr(timeouts, "MISSED_S", 0.6)
    control, theirs = pair(listener)
    os.write(theirs.fileno(), part)
    begin_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"^has not answered for 0\.6 s$"):
        next(control.receive(0.6))
    assert time.monotonic() - begin_s >= 0.6
    assert b"beat" in theirs.recv_bytes()


def test_a_side_that_does_not_read_blocks_nobody(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "MISSED_S", 0.6)
    control, _theirs = pair(listener)

    def send_without_end() -> None:
        while True:
            control.send(WireCall(1, "trial.echo", {"value": b"x" * 10_000_000}))

    with pytest.raises(BlockingIOError):
        send_without_end()
    with pytest.raises(WorkerError, match="has closed its connection"):
        next(control.receive())


def test_importing_the_wire_imports_nothing_heavy() -> None:
    program = (
        "import sys, pytest_llenergy.hosts.agent; "
        "print([name for name in ('numpy', 'torch', 'pynvml', 'ray', 'pytest') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
