# SPDX-License-Identifier: Apache-2.0
"""The bytes of one rank between its host and pytest's: the same messages as on one host, files included.

On one host a large message is a file, whose path is sent. Between hosts its content is sent, and is a file
again on the other side. Nothing here unpickles anything.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.wire import as_socket, set_time_limit
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.transport import (
    FILE_FRAME,
    Channel,
    Spooled,
    no_room_error,
)

#: The size of the file that follows (bytes).
SIZE = struct.Struct("!Q")

#: Size of the parts in which it is sent (bytes).
PART_BYTES = 1 << 20


class StreamChannel(Channel):
    """Either end of the connection of a rank between hosts.

    Args:
        connection: The connection.
        directory: Where files are received.
        lost: A descriptor that becomes readable when the other host is lost, which ends every transfer.
    """

    def __init__(self, connection: Connection, directory: Path, lost: int | None = None) -> None:
        super().__init__(connection, directory)
        self._lost = lost
        # A host that is lost within a message must not block this process.
        set_time_limit(connection, timeouts.PARTIAL_MESSAGE_TIMEOUT_S)

    def send(self, message: Spooled) -> None:
        """See ``Channel``."""
        try:
            super().send(message)
        except BlockingIOError:
            raise BrokenPipeError("the other host does not read") from None

    def _send_file(self, file: str) -> None:
        with Path(file).open("rb") as source:
            left = os.fstat(source.fileno()).st_size
            self.connection.send_bytes(FILE_FRAME + SIZE.pack(left))
            while left > 0:
                part = memoryview(source.read(min(left, PART_BYTES)))
                if not part:
                    raise BrokenPipeError(f"{file} has become shorter")
                left -= len(part)
                while part:
                    part = part[self._send_part(part) :]

    def _receive_file(self, frame: bytes) -> str:
        (size,) = SIZE.unpack(frame)
        try:
            descriptor, path = tempfile.mkstemp(dir=self.directory, prefix="message-")
        except OSError as error:
            raise no_room_error(self.directory, size, error) from None
        try:
            with FileIO(descriptor, "wb") as file:
                left = size
                while left > 0:
                    self._await(select.POLLIN)
                    part = os.read(self.connection.fileno(), min(left, PART_BYTES))
                    if not part:
                        raise EOFError
                    left -= len(part)
                    self._write(file, memoryview(part), size)
        except BaseException:
            Spooled(b"", path).remove()
            raise
        return path

    def _write(self, file: FileIO, part: memoryview, size: int) -> None:
        try:
            while part:
                part = part[file.write(part) :]
        except OSError as error:
            raise no_room_error(self.directory, size, error) from None

    def _send_part(self, part: memoryview) -> int:
        self._await(select.POLLOUT)
        with as_socket(self.connection) as borrowed:
            try:
                return borrowed.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0

    def _await(self, event: int) -> None:
        """Wait until the connection can be read or written; raise ``BrokenPipeError`` if it stays silent."""
        poll = select.poll()
        poll.register(self.connection, event)
        if self._lost is not None:
            poll.register(self._lost, select.POLLIN)
        ready = dict(poll.poll(timeouts.PARTIAL_MESSAGE_TIMEOUT_S * 1e3))
        if not ready or self._lost in ready:
            raise BrokenPipeError("the other host does not move the message")


def relay(near: Channel, far: Channel, sentinels: Sequence[int], mark_log: Callable[[], None]) -> None:
    """Pass messages on between a rank and pytest until one of them has gone; then close both connections.

    Args:
        near: The channel to the rank, on this host.
        far: The channel to pytest.
        sentinels: Descriptors that become readable when the ranks of this host have lost their supervision.
        mark_log: Called before each request.
    """
    request = Spooled(b"")
    poll = select.poll()
    ends = near.connection.fileno(), far.connection.fileno()
    for each in (*ends, *sentinels):
        poll.register(each, select.POLLIN)
    try:
        while True:
            ready = {each for each, _ in poll.poll()}
            if ends[0] in ready:
                answer = near.receive_encoded()
                try:
                    far.send(answer)
                finally:
                    answer.remove()
            elif ends[1] in ready:
                # The rank has answered the request before, and so has read its file.
                request.remove()
                request = _receive_request(far)
                mark_log()
                near.send(request)
            else:
                return
    except (EOFError, OSError):
        return
    finally:
        request.remove()
        near.close()
        far.close()


def _receive_request(far: Channel) -> Spooled:
    try:
        return far.receive_encoded()
    except WorkerError as error:
        # As an answer of the rank, which cannot get the request.
        report = {"time_ns": time.monotonic_ns(), "message": str(error)}
        far.send(far.encode(("error", report)))
        raise EOFError from error
