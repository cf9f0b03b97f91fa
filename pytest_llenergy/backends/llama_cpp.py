# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp inside the rank. Reads GGUF files; needs no torch.

The server listens on a Unix socket that only this user can open. xllamacpp's in-process handlers return the
token ids of the first prompt only and cannot tokenise; the server's routes do both.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.models import ModelSource, check_context_length, gguf_hint
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

#: Longest path in ``sockaddr_un.sun_path`` on every system, without the closing zero (104 bytes on macOS).
MAX_SOCKET_PATH_BYTES = 103

#: Value of ``verbosity``: log errors only.
VERBOSITY_ERRORS = 1

#: Cache sizes are multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256

#: ``LLAMA_DEFAULT_SEED``, which means a random seed.
SEED_LIMIT = 2**32 - 1

#: Requested fields of an answer; by default it repeats the prompt and every setting.
RESPONSE_FIELDS = (
    "index",
    "content",
    "tokens",
    "tokens_predicted",
    "tokens_evaluated",
    "truncated",
    "timings",
)


def refuses(model: ModelSource) -> str | None:
    """Return why llama.cpp cannot read a model. It reads GGUF files."""
    return (
        None if model.kind == "gguf" else f"llama-cpp reads .gguf files, not {model.label}{gguf_hint(model)}"
    )


SPEC = BackendSpec(
    name="llama-cpp",
    factory="pytest_llenergy.backends.llama_cpp:LlamaCppBackend",
    requires=("xllamacpp",),
    install="pip install 'pytest-llenergy[llama-cpp]'",
    capabilities=Capabilities(
        data=True,
        prefix_cache="switched off",
        timestamps="step",
        clock="llama.cpp's durations of prompt and generation, counted back from the arrival of its answer",
        reasons={
            "tensor": "it splits a model over GPUs only, and its wheel is for the CPU",
            "pipeline": "it splits a model over GPUs only, and its wheel is for the CPU",
            "placement": "its wheel is for the CPU",
            "gpu": "its wheel is for the CPU",
            "batching": "one slot per prompt, all prompts in one prefill",
            "caches": "sized for the batch; attention covers the part in use",
            "exact": "late by the latency of a local socket, a millisecond on a quiet machine",
            "stop_token_ids": "its server stops at texts, not at tokens",
        },
        sources={
            **dict.fromkeys(
                ("launch", "managed_by", "cpu", "tasks", "caches", "options", "hardware"), "tested"
            ),
            **dict.fromkeys(("gpu", "tensor", "pipeline", "placement"), "this adapter"),
            "data": "tested",
            "batching": "tested",
            "prefix_cache": "tested",
            "timestamps": "tools/server/README.md of llama.cpp, timings",
            "stop_token_ids": "tools/server/README.md of llama.cpp, POST /completion",
        },
        hardware="CPU",
    ),
    refuses=refuses,
)


@dataclass(frozen=True)
class Capacity:
    """The batch that a server can hold.

    Attributes:
        prompts: Number of prompts side by side.
        tokens: Tokens of each prompt and its output.
        step: Prompt tokens in one step.
    """

    prompts: int
    tokens: int
    step: int


class Server:
    """A loaded model. Its socket is in ``scratch``. Raises ``ModelError`` if llama.cpp cannot load it."""

    def __init__(self, file: str, label: str, capacity: Capacity, threads: int, scratch: str | None) -> None:
        import xllamacpp

        self.capacity = capacity
        # Accessible to this user only: no port is open.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            if len(os.fsencode(self._path)) > MAX_SOCKET_PATH_BYTES:
                raise BackendError(
                    f"llama-cpp: the path of its socket, {self._path}, has more than "
                    f"{MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
                )
            with _captured_stderr(self.directory) as messages:
                try:
                    self._server: Any = xllamacpp.Server(
                        _parameters(xllamacpp, file, self._path, capacity, threads)
                    )
                except RuntimeError as error:
                    reason = _first_error(Path(messages)) or str(error)
                    raise ModelError(f"model {label}: llama.cpp cannot load it ({reason})") from error
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


def _parameters(xllamacpp: Any, file: str, path: str, capacity: Capacity, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = [path]
    params.ui = False
    params.n_threads_http = 1
    params.verbosity = VERBOSITY_ERRORS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.n_parallel = capacity.prompts
    # Divided evenly among the prompts.
    params.n_ctx = capacity.prompts * capacity.tokens
    params.kv_unified = False
    params.n_batch = capacity.step
    params.n_ubatch = min(capacity.step, params.n_ubatch)
    # Would silently change settings that do not fit into memory.
    params.fit_params = False
    params.ctx_shift = False
    # With a prompt cache, a repeated prompt would cost almost nothing.
    params.cache_prompt = False
    params.cache_idle_slots = False
    params.cache_ram_mib = params.n_cache_reuse = params.n_ctx_checkpoints = 0
    return params


@contextmanager
def _captured_stderr(directory: str) -> Iterator[str]:
    """Redirect standard error to a file and yield its name. llama.cpp's exceptions omit the cause."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file.name
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
            sys.stderr.flush()


def _first_error(messages: Path) -> str | None:
    """Return the first error among messages such as ``0.00.037.234 E gguf_init_from_reader: failed to …``."""
    for line in messages.read_text(errors="replace").splitlines():
        _time, mark, text = (*line.split(" ", 2), "", "")[:3]
        if mark == "E":
            return text.strip()
    return None


def _error_message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer)


@dataclass(frozen=True)
class Answer:
    """The server's answer for each prompt, and when it was requested and received."""

    sequences: list[dict[str, Any]]
    sent_ns: int
    received_ns: int

    def start_ns(self) -> int | None:
        """When the server started to compute: its longest sequence ended as it answered.

        None if its durations do not fit between request and answer.
        """
        longest_ms = max(
            each["timings"]["prompt_ms"] + each["timings"]["predicted_ms"] for each in self.sequences
        )
        start_ns = self.received_ns - round(longest_ms * 1e6)
        return start_ns if start_ns >= self.sent_ns else None


@dataclass
class LlamaCppJob:
    """A batch of token ids in one request; each prompt has its own slot."""

    server: Server
    request: dict[str, Any]

    def run(self) -> Answer:
        sent_ns = time.monotonic_ns()
        answer = self.server.request("POST", "/completion", self.request)
        return Answer(answer if isinstance(answer, list) else [answer], sent_ns, time.monotonic_ns())

    def result(self, outcome: Answer) -> Generation:
        prompts = self.request["prompt"]
        sequences = sorted(outcome.sequences, key=lambda each: int(each["index"]))
        start_ns = outcome.start_ns()
        requests = []
        for prompt, sequence in zip(prompts, sequences, strict=True):
            self._check(prompt, sequence)
            prefill_ns, decode_ns = (
                round(sequence["timings"][name] * 1e6) for name in ("prompt_ms", "predicted_ms")
            )
            first_ns = None if start_ns is None else start_ns + prefill_ns
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(sequence["tokens"]),
                    first_token_ns=first_ns,
                    last_token_ns=None if first_ns is None else first_ns + decode_ns,
                )
            )
        return Generation(
            texts=[str(each["content"]) for each in sequences],
            token_ids=[list(map(int, each["tokens"])) for each in sequences],
            requests=requests,
        )

    @staticmethod
    def _check(prompt: list[int], sequence: dict[str, Any]) -> None:
        """Raise ``BackendError`` if the server skipped work or counts different tokens."""
        counted = (
            sequence["tokens_evaluated"],
            sequence["tokens_predicted"],
            sequence["timings"]["cache_n"],
            sequence["truncated"],
        )
        if counted != (len(prompt), len(sequence["tokens"]), 0, False):
            raise BackendError(
                f"llama-cpp: for a prompt of {len(prompt)} tokens and an answer of {len(sequence['tokens'])} "
                f"the server reports: evaluated {counted[0]}, predicted {counted[1]}, from a cache "
                f"{counted[2]}, truncated {counted[3]}"
            )


class LlamaCppBackend:
    """``xllamacpp.Server`` with its prompt cache switched off.

    The capacity is fixed when the model is loaded, so a batch that needs another capacity reloads it.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import xllamacpp

        self._file, self._label = model.location, model.label
        self._threads, self._scratch = context.threads, context.scratch
        self._server: Server | None = None
        properties = self._any_server().request("GET", "/props")
        return BackendInfo(
            name="llama-cpp",
            version=str(xllamacpp.__version__),
            model=model.label,
            dtype=str(properties["model_ftype"]).lower(),
            options={
                "prefix_caching": False,
                "threads": context.threads,
                "device": "CPU",
                # Set by ``_with_capacity`` for each batch, whose tokens are in the record.
                "n_ctx": f"what the batch needs, in steps of {CONTEXT_STEP} a prompt",
                "n_batch": f"the prompts of the batch, in steps of {CONTEXT_STEP}",
                "n_ubatch": f"n_batch, {xllamacpp.CommonParams().n_ubatch} at most",
                "system": " ".join(str(xllamacpp.get_system_info()).split()),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> LlamaCppJob:
        if params.stop_token_ids:
            raise BackendError(
                "llama-cpp: stop_token_ids are not supported: the server stops at texts, not at tokens; "
                "leave them out, or use another backend"
            )
        if params.seed >= SEED_LIMIT:
            raise BackendError(f"llama-cpp: seed is {params.seed}, needs less than 2**32 - 1")
        rows = [self._tokens(prompt) for prompt in prompts]
        if not all(rows):
            raise BackendError("llama-cpp: a prompt has no tokens; leave empty prompts out")
        server = self._with_capacity(rows, params.max_new_tokens)
        sampling: dict[str, Any] = {"samplers": ["temperature"], "temperature": 0.0}
        if params.do_sample:
            # The order of transformers. llama.cpp's default adds penalties and min_p.
            sampling = {
                "samplers": ["temperature", "top_k", "top_p"],
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
            }
        request = {
            **sampling,
            "prompt": rows,
            "n_predict": params.max_new_tokens,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "response_fields": RESPONSE_FIELDS,
        }
        return LlamaCppJob(server, request)

    def _tokens(self, prompt: str) -> list[int]:
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return list(self._any_server().request("POST", "/tokenize", body)["tokens"])

    def _any_server(self) -> Server:
        if self._server is None:
            self._server = self._serve(Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP))
        return self._server

    def _with_capacity(self, rows: list[list[int]], new: int) -> Server:
        needed = max(map(len, rows)) + new
        capacity = Capacity(
            prompts=len(rows),
            tokens=-(-needed // CONTEXT_STEP) * CONTEXT_STEP,
            step=-(-sum(map(len, rows)) // CONTEXT_STEP) * CONTEXT_STEP,
        )
        if self._server is None or self._server.capacity != capacity:
            self.close()
            self._server = self._serve(capacity)
        limit = int(self._server.request("GET", "/props")["default_generation_settings"]["n_ctx"])
        check_context_length("llama-cpp", needed, limit)
        return self._server

    def _serve(self, capacity: Capacity) -> Server:
        return Server(self._file, self._label, capacity, self._threads, self._scratch)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(self._tokens(text)) for text in texts]

    def synchronize(self) -> None:
        """The answer arrives when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
