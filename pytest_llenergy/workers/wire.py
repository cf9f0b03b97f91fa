# SPDX-License-Identifier: Apache-2.0
"""Messages with open files between pytest and the supervisor of its ranks. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

#: A length goes before each message, and the descriptors travel with it.
LENGTH = struct.Struct("!Q")

#: As many as the kernel passes at once (SCM_MAX_FD, include/net/scm.h).
MOST_DESCRIPTORS = 253

#: In the environment of a supervisor and all that comes of it: its directory, which goes when it ends.
SUPERVISOR = "LLENERGY_SUPERVISOR"

#: Nothing that is received may slip into a process that somebody starts meanwhile.
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send plain data, and copies of descriptors. Raises ``OSError`` when the other side is gone."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(descriptors))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and descriptors that are now ours. Raises ``EOFError`` at the end."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MOST_DESCRIPTORS, CLOSE_ON_EXEC)
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
