# SPDX-License-Identifier: Apache-2.0
"""Messages with open files between pytest and the supervisor of its ranks. Standard library only."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import WorkerError

# Messages with open files between pytest and the supervisor of its ranks. Standard library only.

#: A length goes before each message, and the descriptors travel with it.
LENGTH = struct.Struct("!Q")

#: As many as the kernel passes at once (SCM_MAX_FD, include/net/scm.h).
MAX_DESCRIPTORS = 253

#: In the environment of a supervisor and all that comes of it: its directory, which goes when it ends.
SUPERVISOR_VARIABLE = "LLENERGY_SUPERVISOR"

#: Nothing that is received may slip into a process that somebody starts meanwhile.
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send_message(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send plain data, and copies of descriptors. Raises ``OSError`` when the other side is gone."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive_message(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and descriptors that are now ours. Raises ``EOFError`` at the end."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS, CLOSE_ON_EXEC)
    for each in descriptors:
        os.set_inheritable(each, False)
    (length,) = LENGTH.unpack(head + _exactly(connection, LENGTH.size - len(head)))
    return json.loads(_exactly(connection, length)), descriptors


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# Messages between pytest and a rank: small ones over the socket, large ones through a file.

#: Well below what a socket holds: nobody ever waits for the other side to read.
LARGE_BYTES = 1 << 16


class Channel:
    """One end. ``directory`` is private to this host's ranks and pytest."""

    def __init__(self, connection: Connection, directory: Path) -> None:
        self.connection = connection
        self._directory = directory

    def send(self, message: tuple[str, Any]) -> None:
        """Send a word and what belongs to it.

        Raises ``OSError`` when the other side is gone, and ``WorkerError`` where a large message has no room.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > LARGE_BYTES:
            data = pickle.dumps(("file", self._filed(data)))
        self.connection.send_bytes(data)

    def receive(self) -> tuple[str, Any]:
        """The next message. Raises ``EOFError`` when the other side is gone."""
        word, value = pickle.loads(self.connection.recv_bytes())
        if word == "file":
            path = Path(value)
            with path.open("rb") as file:
                word, value = pickle.load(file)
            path.unlink()
        return word, value

    def _filed(self, data: bytes) -> str:
        path = ""
        try:
            descriptor, path = tempfile.mkstemp(dir=self._directory, prefix="message-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except FileNotFoundError:
            # It goes with the ranks.
            raise BrokenPipeError(f"{self._directory} is gone") from None
        except OSError as error:
            with suppress(OSError):
                Path(path).unlink()
            raise WorkerError(
                f"a message of {len(data)} bytes to or from a rank goes by file, and {self._directory} has "
                f"no room for it ({error.strerror}): set TMPDIR to a directory that has"
            ) from None
        return path

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
