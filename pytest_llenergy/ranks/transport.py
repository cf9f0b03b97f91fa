# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest and its supervisor (JSON with open files), and between pytest and a rank (pickles).

A message to or from a rank is one pickle. A large pickle is in a file: its path goes first, or, between
hosts, its content. Standard library only: the supervisor imports this module.
"""

from __future__ import annotations

import _socket
import json
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO, FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from pytest_llenergy.errors import WorkerError

#: Environment variable of a supervisor and all its descendants: its directory, which it removes at its end.
SUPERVISOR_VARIABLE = "LLENERGY_SUPERVISOR"

#: Precedes each message to or from a supervisor; descriptors travel with it.
LENGTH = struct.Struct("!Q")

#: Taken before a test can replace it, as pytest-socket does.
Socket = socket.socket

#: How many descriptors the kernel passes at once (SCM_MAX_FD, include/net/scm.h).
MAX_DESCRIPTORS = 253

#: Received descriptors must not leak into a process that another thread starts at the same time.
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

#: Messages to and from ranks that are larger than this go through a file. It is well below what a socket
#: buffers, so that no side ever waits for the other one to read.
MAX_SOCKET_BYTES = 1 << 16

#: How a message that is in a file begins.
FILE = "file"

#: The value of a message whose value is in a file.
ATTACHED = "attached"

#: How the frame that precedes a message with a file begins; no pickle begins so.
FILE_FRAME = b"F"


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    ours, theirs = _socket.socketpair()
    return Socket(fileno=ours.detach()), Socket(fileno=theirs.detach())


def send_message(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send JSON data and copies of descriptors.

    Args:
        connection: The socket.
        message: Any JSON data.
        descriptors: Open files to send copies of.

    Raises:
        OSError: If the other side is gone.
    """
    body = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive_message(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors, which the caller has to close.

    Raises:
        EOFError: If the other side is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS, CLOSE_ON_EXEC)
    for each in descriptors:
        os.set_inheritable(each, False)
    (length,) = LENGTH.unpack(head + _receive_exactly(connection, LENGTH.size - len(head)))
    return json.loads(_receive_exactly(connection, length)), descriptors


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


@dataclass(frozen=True)
class Spooled:
    """A pickle, or, if it is large, the file that it is in. pytest removes the file, and no rank does."""

    data: bytes
    #: A string, since paths of one version of Python cannot be unpickled in another.
    file: str | None = None

    def open(self) -> BinaryIO:
        """Return a file for an unpickler."""
        return BytesIO(self.data) if self.file is None else Path(self.file).open("rb")

    def remove(self) -> None:
        """Remove the file."""
        if self.file is not None:
            with suppress(OSError):
                Path(self.file).unlink()


def spool(dump: Callable[[Any], object], directory: Path) -> Spooled:
    """Return what ``dump`` writes into the file that it is called with.

    Args:
        dump: Writes a pickle. Its errors are raised.
        directory: Where the file of a large pickle is made.

    Raises:
        BrokenPipeError: The directory has ended with the ranks.
        WorkerError: There is no space for a large pickle.
    """
    with _Outgoing(directory) as file:
        try:
            dump(file)
        except BaseException:
            Spooled(b"", file.path).remove()
            raise
    return Spooled(bytes(file.start) if file.path is None else b"", file.path)


class Channel:
    """One end of the connection between pytest and a rank.

    ``directory`` is private to pytest and the ranks of a host; large messages go through files in it.
    """

    def __init__(self, connection: Connection, directory: Path) -> None:
        self.connection = connection
        self.directory: Path = directory

    def encode(self, message: tuple[str, Any]) -> Spooled:
        """Pickle a verb or a state, and its value; raises as ``spool`` does."""
        word, value = message
        if isinstance(value, Spooled) and value.file is not None:
            return Spooled(pickle.dumps((word, ATTACHED)), value.file)
        found = spool(lambda file: pickle.dump(message, file, pickle.HIGHEST_PROTOCOL), self.directory)
        return found if found.file is None else Spooled(pickle.dumps((FILE, None)), found.file)

    def send(self, message: Spooled) -> None:
        """Send an encoded message.

        Raises:
            OSError: The other side is gone.
        """
        if message.file is not None:
            self._send_file(message.file)
        self.connection.send_bytes(message.data)

    def receive(self, *, remove: bool) -> tuple[str, Any]:
        """Return the next message: a verb or a state, and its value.

        Args:
            remove: Whether to remove the file of a large message.

        Raises:
            EOFError: If the other side is gone.
        """
        encoded = self.receive_encoded()
        word, value = pickle.loads(encoded.data)
        if encoded.file is None:
            return word, value
        if word != FILE:
            return word, Spooled(b"", encoded.file)
        with encoded.open() as file:
            word, value = pickle.load(file)
        if remove:
            encoded.remove()
        return word, value

    def receive_encoded(self) -> Spooled:
        """Return the next message as it was encoded, to pass it on; raises as ``receive`` does."""
        frame = self.connection.recv_bytes()
        if frame.startswith(FILE_FRAME):
            file = self._receive_file(frame[len(FILE_FRAME) :])
            return Spooled(self.connection.recv_bytes(), file)
        return Spooled(frame)

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _send_file(self, file: str) -> None:
        self.connection.send_bytes(FILE_FRAME + os.fsencode(file))

    def _receive_file(self, frame: bytes) -> str:
        return os.fsdecode(frame)


def no_room_error(directory: Path, size: int, error: OSError) -> WorkerError:
    """Return the error for a message of ``size`` bytes or more that cannot be written."""
    return WorkerError(
        f"a message of {size} bytes or more to or from a rank goes by file, and {directory} has no room for "
        f"it ({error.strerror}): set TMPDIR to a directory that has"
    )


class _Outgoing:
    """Receives a pickle, and writes it into a file once it is large."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: FileIO | None = None
        self._size = 0
        self.start = bytearray()
        self.path: str | None = None

    def __enter__(self) -> _Outgoing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, data: Any) -> int:
        """See ``io.RawIOBase.write``."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._size <= MAX_SOCKET_BYTES:
            self.start += view
            return len(view)
        try:
            if self._file is None:
                descriptor, self.path = tempfile.mkstemp(dir=self._directory, prefix="message-")
                self._file = FileIO(descriptor, "wb")
                self._write(self._file, memoryview(self.start))
            self._write(self._file, view)
        except FileNotFoundError:
            raise BrokenPipeError(f"{self._directory} is gone") from None
        except OSError as error:
            raise no_room_error(self._directory, self._size, error) from None
        return len(view)

    @staticmethod
    def _write(file: FileIO, view: memoryview) -> None:
        while view:
            view = view[file.write(view) :]
