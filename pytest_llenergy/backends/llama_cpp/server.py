# SPDX-License-Identifier: Apache-2.0
"""A model loaded into xllamacpp's server: its socket, its requests, its log.

The server listens on a Unix socket that only this user can open. xllamacpp's in-process handlers return the
token ids of the first prompt only and cannot tokenise; the server's routes do both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.engine_options import show_options
from pytest_llenergy.backends.llama_cpp.options import Capacity, Settings, server_parameters
from pytest_llenergy.backends.precision import captured_log, list_types
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.record.record import Precision

#: Longest path in ``sockaddr_un.sun_path`` on every system, without the closing zero (104 bytes on macOS).
MAX_SOCKET_PATH_BYTES = 103

#: Values of ``verbosity``: log errors only, or also what llama.cpp finds and decides while it loads a model.
VERBOSITY_ERRORS, VERBOSITY_LOADING = 1, 4

#: How long its log may lag behind the loaded model or an error, and how often to look (seconds).
LOG_TIMEOUT_S, ERROR_TIMEOUT_S, LOG_POLL_S = 10.0, 2.0, 0.01


class LlamaServer:
    """A loaded model.

    Raises ``ModelError`` if llama.cpp cannot load it, or ``BackendError`` if it was given options.

    Attributes:
        precision: Its number types, with ``describes``.
        attention: Whether flash attention runs, with ``describes``; None if unknown.
    """

    attention: str | None = None

    def __init__(
        self, file: str, label: str, capacity: Capacity, settings: Settings, *, describes: bool = False
    ) -> None:
        import xllamacpp

        self.capacity = capacity
        self.precision: Precision | None = None
        scratch = settings.scratch
        # Accessible to this user only: no port is open.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            if len(os.fsencode(self._path)) > MAX_SOCKET_PATH_BYTES:
                raise BackendError(
                    f"llama-cpp: the path of its socket, {self._path}, has more than "
                    f"{MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
                )
            with captured_log(2, self.directory) as log:
                params = server_parameters(file, self._path, capacity, settings)
                params.verbosity = VERBOSITY_LOADING if describes else VERBOSITY_ERRORS
                try:
                    self._server: Any = xllamacpp.Server(params)
                except RuntimeError as error:
                    reason = _first_error(log) or str(error)
                    given = show_options(settings.options)
                    message = f"llama.cpp cannot load it{f' with {given}' if given else ''} ({reason})"
                    raise (BackendError if given else ModelError)(f"model {label}: {message}") from error
                if describes:
                    self.precision, self.attention = _read_log(log)
            if self._server.listening_address != f"unix://{self._path}":
                raise BackendError(
                    f"llama-cpp: the server listens on {self._server.listening_address} and not on its "
                    "socket; this version of xllamacpp cannot be used"
                )
            # Answered by the server's loop. Closing before the loop has started would wait for it for ever.
            with suppress(BackendError):
                self.request("GET", "/slots")
        except BaseException:
            # No other code knows of the directory yet, so remove it whatever went wrong.
            self.close()
            raise

    def request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the decoded answer.

        Args:
            method: HTTP method.
            route: Path, such as ``/completion``.
            body: Content, sent as JSON.

        Raises:
            BackendError: If the server refuses it.
        """
        connection = _UnixConnection(self._path)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, route, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise BackendError(f"llama-cpp: its server does not answer {route} ({error!r})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise BackendError(f"llama-cpp: {_error_message(answer)}")
        return answer

    def close(self) -> None:
        """Stop the server and free the model."""
        self._server = None
        shutil.rmtree(self.directory, ignore_errors=True)


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _read_log(log: Path) -> tuple[Precision, str | None]:
    """Return number types and attention from what llama.cpp printed while loading a model."""
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while True:
        text = log.read_text(errors="replace")
        cache = re.search(r"llama_kv_cache: size = .*K \((\w+)\).*V \((\w+)\)", text)
        flash = re.search(r"(?:Flash Attention|flash_attn +=) (enabled|disabled)", text)
        # It prints in a thread of its own.
        if (cache and flash) or time.monotonic() > deadline:
            break
        time.sleep(LOG_POLL_S)
    kv_cache = list_types(Counter(cache.groups())) if cache else None
    return Precision(kv_cache=kv_cache), flash[1] if flash else None


def _first_error(messages: Path) -> str | None:
    """Return the first error among messages such as ``0.00.037.234 E gguf_init_from_reader: failed to …``."""
    # It prints in a thread of its own.
    deadline = time.monotonic() + ERROR_TIMEOUT_S
    while time.monotonic() < deadline:
        for line in messages.read_text(errors="replace").splitlines():
            _time, mark, text = (*line.split(" ", 2), "", "")[:3]
            if mark == "E":
                return text.strip()
        time.sleep(LOG_POLL_S)
    return None


def _error_message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer)
