# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest and a rank: small ones over the socket, large ones through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Well below what a socket holds: nobody ever waits for the other side to read.
LARGE_BYTES = 1 << 16


class Channel:
    """One end. ``directory`` is private to this host's ranks and pytest."""

    def __init__(self, connection: Connection, directory: Path) -> None:
        self.connection = connection
        self._directory = directory

    def send(self, message: tuple[str, Any]) -> None:
        """Send a word and what belongs to it. Raises ``OSError`` when the other side is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > LARGE_BYTES:
            descriptor, path = tempfile.mkstemp(dir=self._directory, prefix="message-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            data = pickle.dumps(("file", path))
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

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
