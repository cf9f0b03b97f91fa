# SPDX-License-Identifier: Apache-2.0
"""The connection of a host: strangers, and both ends of a link, without agents."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.connection import Invitation, Link, Listener, Message, connect
from pytest_llenergy.ranks.transport import connection_pair

#: More than all buffers between two ends hold.
LARGE_BYTES = 8 << 20


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A listener."""
    opened = Listener()
    yield opened
    opened.close()


def invitation_of(listener: Listener) -> Invitation:
    return Invitation(*json.loads(listener.invitation))


def knock(listener: Listener) -> Connection:
    """Open a connection as a stranger."""
    opened = socket.create_connection(("127.0.0.1", invitation_of(listener).port))
    return Connection(opened.detach())


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Bomb:
    """Creates a directory where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.place),)


def test_nothing_of_a_stranger_is_unpickled(listener: Listener, tmp_path: Path) -> None:
    with knock(listener) as stranger:
        stranger.send_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
        assert listener.accept(60.0) is None
    assert not (tmp_path / "exploded").exists()


def test_neither_side_accepts_another_key(listener: Listener) -> None:
    accepting = beside(lambda: listener.accept(60.0))
    with pytest.raises(
        WorkerError, match=r"^pytest cannot be reached at 127\.0\.0\.1:\d+: digest .* rejected"
    ):
        connect(invitation_of(listener)._replace(key="another key"))
    accepting.join()
    with knock(listener) as stranger:
        accepting = beside(lambda: listener.accept(60.0))
        with pytest.raises(Exception, match="digest sent was rejected"):
            answer_challenge(stranger, b"another key")
        accepting.join()


def test_a_silent_stranger_only_delays_the_next_one(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "HANDSHAKE_TIMEOUT_S", 0.2)
    with knock(listener):
        begin_s = time.monotonic()
        assert listener.accept(60.0) is None
        assert time.monotonic() - begin_s < 30
    monkeypatch.setattr(timeouts, "HANDSHAKE_TIMEOUT_S", 30.0)
    beside(lambda: connect(invitation_of(listener)).send("here"))
    accepted = listener.accept(60.0)
    assert accepted is not None
    assert accepted.recv() == "here"


class Ends:
    """Two ends of a link, and what each has received."""

    def __init__(self) -> None:
        self.received: tuple[list[Message], list[Message]] = ([], [])
        self.reasons: list[str] = ["", ""]
        self.links = [
            Link(end, partial(self._receive, number), echoes=number == 1)
            for number, end in enumerate(connection_pair())
        ]
        self.threads = [beside(partial(self._run, number)) for number in range(2)]

    def _receive(self, number: int, message: Message, _arrival_ns: int) -> None:
        self.received[number].append(message)

    def _run(self, number: int) -> None:
        self.reasons[number] = self.links[number].run()
        self.links[number].close()

    def await_end(self) -> list[str]:
        for each in self.threads:
            each.join(60)
        return self.reasons


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends that beat ten times as often as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "BEAT_S", 0.1)
        patch.setattr(timeouts, "MISSED_S", 1.0)
        opened = Ends()
        yield opened
        opened.links[0].shut_down()
        opened.await_end()


def test_beats_keep_a_link_on_which_nobody_speaks(ends: Ends) -> None:
    time.sleep(1.5)
    ends.links[0].send(("call", 1))
    ends.links[0].shut_down()
    assert ends.await_end() == ["has closed its connection"] * 2
    assert ends.received == ([], [("call", 1)])


def test_bytes_of_ranks_cross_both_ways_at_the_same_time(ends: Ends) -> None:
    pairs = []
    for number in range(3):
        near = ends.links[0].open_channel(number)
        far, theirs = connection_pair()
        ends.links[1].attach(number, theirs)
        pairs.append((near, far))
    data = os.urandom(LARGE_BYTES)
    received: list[bytes] = []
    sending = [beside(partial(end.send_bytes, data)) for pair in pairs for end in pair]
    # One after the other: what nobody reads must not hold up the rest.
    for end in (end for pair in pairs for end in pair):
        received.append(end.recv_bytes())
    for each in sending:
        each.join(60)
    assert received == [data] * 6


def test_a_side_that_only_sends_data_hears_the_other_one(ends: Ends) -> None:
    near = ends.links[0].open_channel(0)
    far, theirs = connection_pair()
    ends.links[1].attach(0, theirs)
    received: list[bytes] = []
    reading = beside(lambda: received.extend(far.recv_bytes() for _ in range(20)))
    # Far longer than three beats.
    for _ in range(20):
        near.send_bytes(b"x" * LARGE_BYTES)
        time.sleep(0.1)
    reading.join(60)
    assert len(received) == 20
    assert all(each.is_alive() for each in ends.threads)


def test_the_end_of_a_rank_comes_after_its_last_bytes(ends: Ends) -> None:
    near = ends.links[0].open_channel(7)
    far, theirs = connection_pair()
    ends.links[1].attach(7, theirs)

    def write_and_end() -> None:
        far.send_bytes(b"x" * LARGE_BYTES)
        far.close()

    beside(write_and_end)
    assert near.recv_bytes() == b"x" * LARGE_BYTES
    with pytest.raises((EOFError, ConnectionError)):
        near.recv_bytes()


def test_ranks_end_with_their_link(ends: Ends) -> None:
    near = ends.links[0].open_channel(0)
    ends.links[1].shut_down()
    ends.await_end()
    with pytest.raises((EOFError, ConnectionError)):
        near.recv_bytes()
