# SPDX-License-Identifier: Apache-2.0
"""llama.cpp, through its server in the rank."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.models import ModelSource, gguf_hint
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

# llama.cpp on the CPU, through the server of xllamacpp: reads GGUF files, needs no torch.


# One server of llama.cpp in this process, behind a socket that no one else can open.
#
# xllamacpp's handlers in the process lack the token ids of all prompts but the first, and tokenising; the
# server's own routes have both.

#: Bytes that fit ``sockaddr_un.sun_path`` on every system, the closing zero left out (104 on macOS).
MAX_SOCKET_PATH_BYTES = 103

#: Of messages the engine writes errors only.
VERBOSITY_ERRORS = 1


@dataclass(frozen=True)
class Capacity:
    """What a server has room for: prompts side by side, tokens of each, prompt tokens in one step."""

    prompts: int
    tokens: int
    step: int


class Server:
    """A loaded model; its socket is in ``scratch``. Raises ``ModelError`` when the engine cannot load it."""

    def __init__(self, file: str, label: str, room: Capacity, threads: int, scratch: str | None) -> None:
        import xllamacpp

        self.room = room
        # Of this user alone, so no port is open and nobody else can ask.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            if len(os.fsencode(self._path)) > MAX_SOCKET_PATH_BYTES:
                raise BackendError(
                    f"llama-cpp: the path of its socket, {self._path}, has more than "
                    f"{MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
                )
            with _captured_stderr() as messages:
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
        connection = _UnixConnection(self._path)
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
            raise BackendError(f"llama-cpp: {_error_message(answer)}")
        return answer

    def close(self) -> None:
        """End its threads and free the model."""
        self._server = None
        shutil.rmtree(self.directory, ignore_errors=True)


class _UnixConnection(HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _parameters(xllamacpp: Any, file: str, path: str, room: Capacity, threads: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = [path]
    params.ui = False
    params.n_threads_http = 1
    params.verbosity = VERBOSITY_ERRORS
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
def _captured_stderr() -> Iterator[str]:
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


def _error_message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer)


# What llama.cpp offers.


def refuses(model: ModelSource) -> str | None:
    """llama.cpp reads GGUF files."""
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
        clock="the engine's own durations of prompt and generation, laid back from the arrival of its answer",
        reasons={
            "tensor": "it splits a model over GPUs only, and its wheel is for the CPU",
            "pipeline": "it splits a model over GPUs only, and its wheel is for the CPU",
            "placement": "its wheel is for the CPU",
            "gpu": "its wheel is for the CPU",
            "batching": "one slot a prompt, all prompts in one prefill",
            "caches": "as large as the batch can need; attention covers the part in use",
            "exact": "late by the way of its answer through a local socket, a millisecond on a quiet machine",
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


# Loading a GGUF file, and batches of token ids through the server's ``/completion``.

#: The engine's caches come in multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256

#: ``LLAMA_DEFAULT_SEED``, which stands for a random one.
SEED_LIMIT = 2**32 - 1

#: What is asked of an answer; without this it repeats the prompt and every setting.
RESPONSE_FIELDS = (
    "index",
    "content",
    "tokens",
    "tokens_predicted",
    "tokens_evaluated",
    "truncated",
    "timings",
)


@dataclass(frozen=True)
class Answer:
    """What the server said of each prompt, and when it was asked and had answered."""

    sequences: list[dict[str, Any]]
    asked_ns: int
    answered_ns: int

    def starts_ns(self) -> int | None:
        """When the engine began: its longest sequence ended as it answered.

        ``None`` where its durations do not fit between question and answer.
        """
        longest_ms = max(
            each["timings"]["prompt_ms"] + each["timings"]["predicted_ms"] for each in self.sequences
        )
        start_ns = self.answered_ns - round(longest_ms * 1e6)
        return start_ns if start_ns >= self.asked_ns else None


@dataclass
class LlamaCppJob:
    """A batch of token ids, one request for all of them; each has a slot of its own."""

    server: Server
    request: dict[str, Any]

    def run(self) -> Answer:
        asked_ns = time.monotonic_ns()
        answer = self.server.ask("POST", "/completion", self.request)
        return Answer(answer if isinstance(answer, list) else [answer], asked_ns, time.monotonic_ns())

    def result(self, outcome: Answer) -> Generation:
        prompts = self.request["prompt"]
        sequences = sorted(outcome.sequences, key=lambda told: int(told["index"]))
        start_ns = outcome.starts_ns()
        requests = []
        for prompt, told in zip(prompts, sequences, strict=True):
            self._check(prompt, told)
            prefill_ns, decode_ns = (
                round(told["timings"][name] * 1e6) for name in ("prompt_ms", "predicted_ms")
            )
            first_ns = None if start_ns is None else start_ns + prefill_ns
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(told["tokens"]),
                    first_token_ns=first_ns,
                    last_token_ns=None if first_ns is None else first_ns + decode_ns,
                )
            )
        return Generation(
            texts=[str(told["content"]) for told in sequences],
            token_ids=[list(map(int, told["tokens"])) for told in sequences],
            requests=requests,
        )

    @staticmethod
    def _check(prompt: list[int], told: dict[str, Any]) -> None:
        """Raises ``BackendError`` when the engine has not done the whole work, or counts another."""
        counted = (
            told["tokens_evaluated"],
            told["tokens_predicted"],
            told["timings"]["cache_n"],
            told["truncated"],
        )
        if counted != (len(prompt), len(told["tokens"]), 0, False):
            raise BackendError(
                f"llama-cpp: of a prompt of {len(prompt)} tokens and an answer of {len(told['tokens'])} the "
                f"engine says: evaluated {counted[0]}, predicted {counted[1]}, from a cache {counted[2]}, "
                f"truncated {counted[3]}"
            )


class LlamaCppBackend:
    """``xllamacpp.Server`` with its prompt cache switched off.

    How much it has room for is settled when it loads the model, so it does that anew for a batch that needs
    another room than the last.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import xllamacpp

        self._file, self._label = model.location, model.label
        self._threads, self._scratch = context.threads, context.scratch
        self._server: Server | None = None
        told = self._any_server().ask("GET", "/props")
        return BackendInfo(
            name="llama-cpp",
            version=str(xllamacpp.__version__),
            model=model.label,
            dtype=str(told["model_ftype"]).lower(),
            options={
                "prefix_caching": False,
                "threads": context.threads,
                "device": "CPU",
                # See ``_with_room``: a batch decides, and its tokens are in the record.
                "n_ctx": f"what the batch needs, in steps of {CONTEXT_STEP} a prompt",
                "n_batch": f"the prompts of the batch, in steps of {CONTEXT_STEP}",
                "n_ubatch": f"n_batch, {xllamacpp.CommonParams().n_ubatch} at most",
                "system": " ".join(str(xllamacpp.get_system_info()).split()),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> LlamaCppJob:
        if params.stop_token_ids:
            raise BackendError(
                "llama-cpp: stop_token_ids are not offered, since its server stops at texts and not at "
                "tokens; leave them out, or use a backend that takes them"
            )
        if params.seed >= SEED_LIMIT:
            raise BackendError(f"llama-cpp: seed is {params.seed}, needs less than 2**32 - 1")
        rows = [self._tokens(prompt) for prompt in prompts]
        if not all(rows):
            raise BackendError("llama-cpp: a prompt has no tokens; leave empty prompts out")
        server = self._with_room(rows, params.max_new_tokens)
        sampling: dict[str, Any] = {"samplers": ["temperature"], "temperature": 0.0}
        if params.do_sample:
            # The order of transformers; the engine's own has penalties and a least probability besides.
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
        return list(self._any_server().ask("POST", "/tokenize", body)["tokens"])

    def _any_server(self) -> Server:
        if self._server is None:
            self._server = self._serve(Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP))
        return self._server

    def _with_room(self, rows: list[list[int]], new: int) -> Server:
        needed = max(map(len, rows)) + new
        room = Capacity(
            prompts=len(rows),
            tokens=-(-needed // CONTEXT_STEP) * CONTEXT_STEP,
            step=-(-sum(map(len, rows)) // CONTEXT_STEP) * CONTEXT_STEP,
        )
        if self._server is None or self._server.room != room:
            self.close()
            self._server = self._serve(room)
        has = int(self._server.ask("GET", "/props")["default_generation_settings"]["n_ctx"])
        if needed > has:
            raise BackendError(
                f"llama-cpp: longest prompt and max_new_tokens are {needed} tokens; the model has room for "
                f"{has}"
            )
        return self._server

    def _serve(self, room: Capacity) -> Server:
        return Server(self._file, self._label, room, self._threads, self._scratch)

    def synchronize(self) -> None:
        """The answer comes when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
