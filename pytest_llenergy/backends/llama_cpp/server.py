# SPDX-License-Identifier: Apache-2.0
"""A model loaded into xllamacpp's server: its parameters, its socket, its requests, its log.

The server listens on a Unix socket that only this user can open. xllamacpp's in-process handlers return the
token ids of the first prompt only and cannot tokenise; the server's routes do both.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.gguf_files import FLOATS
from pytest_llenergy.backends.llama_cpp import SPEC
from pytest_llenergy.backends.options import select_options, show_options
from pytest_llenergy.backends.precision import captured_log, list_types
from pytest_llenergy.backends.timeouts import LOG_POLL_S, LOG_TIMEOUT_S
from pytest_llenergy.errors import BackendError, ModelError

#: Cache sizes are multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256

#: Value of ``verbosity``: log errors only.
ERRORS_ONLY = 1


@dataclass(frozen=True)
class Capacity:
    """The batch that a server can hold: its prompts, the tokens of each with its output, those of a step."""

    prompts: int
    tokens: int
    step: int


SMALLEST = Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP)


class LlamaServer:
    """A loaded model, for batches of some capacity.

    Raises ``ModelError`` if llama.cpp cannot load it, or ``BackendError`` if it was given options.
    """

    def __init__(
        self, file: str, label: str, capacity: Capacity, options: Mapping[str, Any], context: RankContext
    ) -> None:
        import xllamacpp

        self.capacity = capacity
        # Accessible to this user only: no port is open.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=context.scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            params = _server_parameters(options, capacity, context.threads)
            params.model.path = file
            params.hostnames = [self._path]
            #: The types of its cache.
            self.kv_cache = list_types(
                Counter([_type_of(params.cache_type_k), _type_of(params.cache_type_v)])
            )
            with captured_log(2, self.directory) as log:
                try:
                    self._server: Any = xllamacpp.Server(params)
                except RuntimeError as error:
                    given = show_options(options)
                    what = f"llama.cpp cannot load it{f' with {given}' if given else ''}"
                    raise (BackendError if given else ModelError)(
                        f"model {label}: {what} ({_await_error(log) or error})"
                    ) from error
            # Answered by the server's loop. Closing before the loop has started would wait for it for ever.
            with suppress(BackendError):
                self.request("GET", "/slots")
        except BaseException:
            # No other code knows of the directory yet.
            self.close()
            raise

    def request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, such as to ``/completion``, and return the decoded answer."""
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
            raise BackendError(f"llama-cpp: {answer.get('error', {}).get('message', answer)}")
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


def _server_parameters(options: Mapping[str, Any], capacity: Capacity, threads: int) -> Any:
    """Return the ``xllamacpp.CommonParams`` of a server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    ours: dict[str, Any] = {
        "ui": False,
        "verbosity": ERRORS_ONLY,
        "n_threads_http": 1,
        "n_gpu_layers": 0,
        "n_parallel": capacity.prompts,
        # Divided evenly among the prompts.
        "n_ctx": capacity.prompts * capacity.tokens,
        "kv_unified": False,
        "n_batch": capacity.step,
        # Would silently change settings that do not fit into memory.
        "fit_params": False,
        "ctx_shift": False,
        # With a prompt cache, a repeated prompt would cost almost nothing.
        "cache_prompt": False,
        "cache_idle_slots": False,
        **dict.fromkeys(("cache_ram_mib", "n_cache_reuse", "n_ctx_checkpoints"), 0),
    }
    if dtype := options.get("dtype"):
        ours |= dict.fromkeys(("cache_type_k", "cache_type_v"), f"GGML_TYPE_{FLOATS[dtype]}")
    nested = ("model", "hostnames", "port", "cpuparams", "cpuparams_batch", "lora_adapters")
    passed = select_options("llama-cpp", options, SPEC.capabilities.options, (*ours, *nested))
    for name, value in {**ours, **passed}.items():
        _set_parameter(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ubatch = min(capacity.step, params.n_ubatch)
    return params


def _set_parameter(params: Any, name: str, value: object) -> None:
    """Set a field of llama.cpp's parameters; enumerations by the name of a value."""
    members = getattr(type(getattr(params, name, None)), "__members__", {})
    try:
        setattr(params, name, members.get(value, value) if isinstance(value, str) else value)
    except (AttributeError, OverflowError, TypeError) as error:
        known = f"; it takes: {', '.join(members)}" if members else ""
        raise BackendError(f"llama-cpp: {name} is {value!r}: {error}{known}") from error


def _type_of(value: Any) -> str:
    """Return the name of a type in records: ``q8_0`` for ``GGML_TYPE_Q8_0``."""
    return str(value.name).removeprefix("GGML_TYPE_").lower()


def _await_error(log: Path) -> str | None:
    """Return the first error among messages such as ``0.00.037.234 E gguf_init_from_reader: failed to …``."""
    # It prints in a thread of its own.
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while time.monotonic() < deadline:
        if found := re.search(r"^\S+ E (.*)", log.read_text(errors="replace"), re.MULTILINE):
            return found[1].strip()
        time.sleep(LOG_POLL_S)
    return None
