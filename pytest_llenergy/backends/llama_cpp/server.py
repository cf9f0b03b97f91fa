# SPDX-License-Identifier: Apache-2.0
"""One server of llama.cpp in this process, behind a socket that no one else can open.

xllamacpp's handlers in the process lack the token ids of all prompts but the first, and tokenising; the
server's own routes have both.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import BackendError, ModelError

#: Bytes that fit ``sockaddr_un.sun_path`` on every system, the closing zero left out (104 on macOS).
LONGEST_PATH = 103

#: Of messages the engine writes errors only.
ERRORS_ONLY = 1


@dataclass(frozen=True)
class Room:
    """What a server has room for: prompts side by side, tokens of each, prompt tokens in one step."""

    prompts: int
    tokens: int
    step: int


class Server:
    """A loaded model; its socket is in ``scratch``. Raises ``ModelError`` when the engine cannot load it."""

    def __init__(self, file: str, label: str, room: Room, threads: int, scratch: str | None) -> None:
        import xllamacpp

        self.room = room
        # Of this user alone, so no port is open and nobody else can ask.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            if len(os.fsencode(self._path)) > LONGEST_PATH:
                raise BackendError(
                    f"llama-cpp: the path of its socket, {self._path}, has more than {LONGEST_PATH} bytes; "
                    "set TMPDIR to a shorter directory"
                )
            with _messages() as messages:
                try:
                    self._server: Any = xllamacpp.Server(
                        _parameters(xllamacpp, file, self._path, room, threads)
                    )
                except RuntimeError as error:
                    reason = _first_error(Path(messages)) or str(error)
                    raise ModelError(f"model {label}: llama.cpp cannot load it ({reason})") from error
            if self._server.listening_address != f"unix://{self._path}":
                raise BackendError(
                    f"llama-cpp: the server listens on {self._server.listening_address} and not on its "
                    "socket; this version of xllamacpp cannot be used"
                )
        except BaseException:
            # Nobody else knows of the directory yet, whatever it was that went wrong.
            self.close()
            raise

    def ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The server's answer, decoded. Raises ``BackendError`` with its message where it refuses."""
        connection = _Local(self._path)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, route, sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise BackendError(f"llama-cpp: its server does not answer {route} ({error!r})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise BackendError(f"llama-cpp: {_told(answer)}")
        return answer

    def close(self) -> None:
        """End its threads and free the model."""
        self._server = None
        shutil.rmtree(self.directory, ignore_errors=True)


class _Local(HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _parameters(xllamacpp: Any, file: str, path: str, room: Room, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = [path]
    params.ui = False
    params.n_threads_http = 1
    params.verbosity = ERRORS_ONLY
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.n_parallel = room.prompts
    # Shared out evenly over the prompts.
    params.n_ctx = room.prompts * room.tokens
    params.kv_unified = False
    params.n_batch = room.step
    params.n_ubatch = min(room.step, params.n_ubatch)
    # It would change what does not fit the memory, and say nothing.
    params.fit_params = False
    params.ctx_shift = False
    # A repeated prompt would be nearly free.
    params.cache_prompt = False
    params.cache_idle_slots = False
    params.cache_ram_mib = params.n_cache_reuse = params.n_ctx_checkpoints = 0
    return params


@contextmanager
def _messages() -> Iterator[str]:
    """The file that standard error goes to meanwhile; the engine's exceptions say nothing of the cause."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.NamedTemporaryFile(prefix="llenergy-llama-") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file.name
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
            sys.stderr.flush()


def _first_error(messages: Path) -> str | None:
    """The first error among messages such as ``0.00.037.234 E gguf_init_from_reader: failed to …``."""
    for line in messages.read_text(errors="replace").splitlines():
        _time, mark, text = (*line.split(" ", 2), "", "")[:3]
        if mark == "E":
            return text.strip()
    return None


def _told(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer)
