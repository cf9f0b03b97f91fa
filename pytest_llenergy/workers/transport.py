# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest and its supervisor (JSON with open files), and between pytest and a rank (pickles).

Standard library only: the supervisor imports this module.
"""

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


class Channel:
    """One end of the connection between pytest and a rank.

    ``directory`` is private to pytest and the ranks of a host; large messages go through files in it.
    """

    def __init__(self, connection: Connection, directory: Path) -> None:
        self.connection = connection
        self._directory = directory

    def send(self, message: tuple[str, Any]) -> None:
        """Send a verb or a state, and its value.

        Raises:
            OSError: The other side is gone.
            WorkerError: There is no space for a large message.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_SOCKET_BYTES:
            data = pickle.dumps(("file", self._write_file(data)))
        self.connection.send_bytes(data)

    def receive(self) -> tuple[str, Any]:
        """Return the next message.

        Raises:
            EOFError: If the other side is gone.
        """
        word, value = pickle.loads(self.connection.recv_bytes())
        if word == "file":
            path = Path(value)
            with path.open("rb") as file:
                word, value = pickle.load(file)
            path.unlink()
        return word, value

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _write_file(self, data: bytes) -> str:
        path = ""
        try:
            descriptor, path = tempfile.mkstemp(dir=self._directory, prefix="message-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except FileNotFoundError:
            # The directory ends with the ranks.
            raise BrokenPipeError(f"{self._directory} is gone") from None
        except OSError as error:
            with suppress(OSError):
                Path(path).unlink()
            raise WorkerError(
                f"a message of {len(data)} bytes to or from a rank goes by file, and {self._directory} has "
                f"no room for it ({error.strerror}): set TMPDIR to a directory that has"
            ) from None
        return path
