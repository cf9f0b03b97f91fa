# SPDX-License-Identifier: Apache-2.0
"""Messages between pytest and a rank: small ones over the socket, large ones through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import WorkerError

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
