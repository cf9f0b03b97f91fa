# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest and its supervisor (JSON with open files), and between pytest and a rank (pickles).

A message to or from a rank is one pickle. A large pickle is in a file: its path goes first, or, between
hosts, its content. Standard library only: the supervisor imports this module.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO, FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts

#: Environment variable of a supervisor and all its descendants: its directory, which it removes at its end.
SUPERVISOR_VARIABLE = "LLENERGY_SUPERVISOR"

#: Precedes each message to or from a supervisor; descriptors travel with it.
LENGTH = struct.Struct("!Q")

#: How many descriptors the kernel passes at once (SCM_MAX_FD, include/net/scm.h).
MAX_DESCRIPTORS = 253

#: Received descriptors must not leak into a process that another thread starts at the same time.
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

#: Messages to and from ranks that are larger than this go through a file. It is well below what a socket
#: buffers, so that no side ever waits for the other one to read.
MAX_SOCKET_BYTES = 1 << 16

#: How messages beside requests and answers begin: one is in a file; a large one moves, or has moved.
FILE, MOVING, MOVED = "file", "moving", "moved"

#: The value of a message whose value is in a file.
ATTACHED = "attached"

#: How the frame that precedes a message with a file begins; no pickle begins so.
FILE_FRAME = b"F"


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


Note = Callable[[float, bool], None]
"""Called while large data moves, with the seconds since the last call and whether it goes on."""


def ignore_note(_seconds: float, _goes_on: bool) -> None:
    """Ignore that data moves; a ``Note``."""


@dataclass(frozen=True)
class Spooled:
    """A pickle, or, if it is large, the file that it is in. pytest removes the file, and no rank does."""

    data: bytes
    #: A string, since paths of one version of Python cannot be unpickled in another.
    file: str | None = None

    @contextmanager
    def open(self, note: Note) -> Iterator[Any]:
        """Yield a file for an unpickler."""
        if self.file is None:
            yield BytesIO(self.data)
        else:
            with Progress(note) as progress, Path(self.file).open("rb") as file:
                yield _Parts(file, progress)

    def remove(self) -> None:
        """Remove the file."""
        if self.file is not None:
            with suppress(OSError):
                Path(self.file).unlink()


def spool(dump: Callable[[Any], object], directory: Path, note: Note) -> Spooled:
    """Return what ``dump`` writes into the file that it is called with.

    Args:
        dump: Writes a pickle. Its errors are raised.
        directory: Where the file of a large pickle is made.
        note: Called while a large pickle is written.

    Raises:
        BrokenPipeError: The directory has ended with the ranks.
        WorkerError: There is no space for a large pickle.
    """
    with ExitStack() as end:
        file = _Outgoing(directory, note, end)
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

    def encode(self, message: tuple[str, Any], note: Note) -> Spooled:
        """Pickle a verb or a state, and its value; raises as ``spool`` does."""
        word, value = message
        if isinstance(value, Spooled) and value.file is not None:
            return Spooled(pickle.dumps((word, ATTACHED)), value.file)
        found = spool(lambda file: pickle.dump(message, file, pickle.HIGHEST_PROTOCOL), self.directory, note)
        return found if found.file is None else Spooled(pickle.dumps((FILE, None)), found.file)

    def send(self, message: Spooled, note: Note = ignore_note) -> None:
        """Send an encoded message.

        Args:
            message: The message.
            note: Called while a large message moves.

        Raises:
            OSError: The other side is gone.
        """
        if message.file is not None:
            self._send_file(message.file, note)
        self.connection.send_bytes(message.data)

    def receive(self, note: Note, *, remove: bool) -> tuple[str, Any]:
        """Return the next message: a verb or a state, and its value.

        Args:
            note: Called while a large message moves.
            remove: Whether to remove the file of a large message.

        Raises:
            EOFError: If the other side is gone.
        """
        encoded = self.receive_encoded(note)
        word, value = pickle.loads(encoded.data)
        if encoded.file is None:
            return word, value
        if word != FILE:
            return word, Spooled(b"", encoded.file)
        with encoded.open(note) as file:
            word, value = pickle.load(file)
        if remove:
            encoded.remove()
        return word, value

    def receive_encoded(self, note: Note) -> Spooled:
        """Return the next message as it was encoded, to pass it on; raises as ``receive`` does."""
        frame = self.connection.recv_bytes()
        if frame.startswith(FILE_FRAME):
            file = self._receive_file(frame[len(FILE_FRAME) :], note)
            return Spooled(self.connection.recv_bytes(), file)
        return Spooled(frame)

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _send_file(self, file: str, note: Note) -> None:
        self.connection.send_bytes(FILE_FRAME + os.fsencode(file))

    def _receive_file(self, frame: bytes, note: Note) -> str:
        return os.fsdecode(frame)


class RankChannel(Channel):
    """The end in a rank, which reports to pytest while large data moves."""

    def report_transfer(self, seconds: float, goes_on: bool) -> None:
        """Send a report; a ``Note``."""
        self.connection.send_bytes(pickle.dumps((MOVING if goes_on else MOVED, seconds)))

    def receive_request(self) -> tuple[str, Any]:
        """Return the next request. Raises ``EOFError`` if pytest is gone."""
        return self.receive(self.report_transfer, remove=False)

    def answer(self, message: tuple[str, Any]) -> None:
        """Send an answer; raises as ``spool`` and ``send`` do."""
        self.send(self.encode(message, self.report_transfer))


def no_room_error(directory: Path, size: int, error: OSError) -> WorkerError:
    """Return the error for a message of ``size`` bytes or more that cannot be written."""
    return WorkerError(
        f"a message of {size} bytes or more to or from a rank goes by file, and {directory} has no room for "
        f"it ({error.strerror}): set TMPDIR to a directory that has"
    )


class Progress:
    """Calls a ``Note`` at the start, at intervals while parts move, and at the end."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._last_s = time.monotonic()

    def __enter__(self) -> Progress:
        self._note(0.0, True)
        return self

    def __exit__(self, *_: object) -> None:
        self._note(time.monotonic() - self._last_s, False)

    def advance(self) -> None:
        """Note that a part has moved."""
        now_s = time.monotonic()
        if now_s - self._last_s >= timeouts.TRANSFER_REPORT_S:
            self._note(now_s - self._last_s, True)
            self._last_s = now_s


class _Outgoing:
    """Receives a pickle, and writes it into a file once it is large."""

    def __init__(self, directory: Path, note: Note, end: ExitStack) -> None:
        self._directory = directory
        self._note = note
        self._end = end
        self._file: FileIO | None = None
        self._size = 0
        self.start = bytearray()
        self.path: str | None = None

    def write(self, data: Any) -> int:
        """See ``io.RawIOBase.write``."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._size <= MAX_SOCKET_BYTES:
            self.start += view
            return len(view)
        try:
            if self._file is None:
                self._file = self._open()
                self._write(self._file, memoryview(self.start))
            self._write(self._file, view)
        except FileNotFoundError:
            raise BrokenPipeError(f"{self._directory} is gone") from None
        except OSError as error:
            raise no_room_error(self._directory, self._size, error) from None
        return len(view)

    def _open(self) -> FileIO:
        descriptor, self.path = tempfile.mkstemp(dir=self._directory, prefix="message-")
        self._progress = self._end.enter_context(Progress(self._note))
        return self._end.enter_context(FileIO(descriptor, "wb"))

    def _write(self, file: FileIO, view: memoryview) -> None:
        while view:
            view = view[file.write(view[: timeouts.TRANSFER_PART_BYTES]) :]
            self._progress.advance()


class _Parts:
    """Reads a file for the unpickler. Large values are read in parts, directly into their memory."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self.readline = file.readline

    def read(self, size: int) -> bytes:
        """See ``io.RawIOBase.read``."""
        self._progress.advance()
        return self._file.read(size)

    def readinto(self, buffer: memoryview) -> int:
        """See ``io.RawIOBase.readinto``."""
        view, done = memoryview(buffer).cast("B"), 0
        while part := self._file.readinto(view[done : done + timeouts.TRANSFER_PART_BYTES]):  # type: ignore[attr-defined]
            done += part
            self._progress.advance()
        return done
