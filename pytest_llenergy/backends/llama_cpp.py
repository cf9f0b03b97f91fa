# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp inside the rank. Reads GGUF files; needs no torch.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.batches import check_lengths
from pytest_llenergy.backends.engine_options import NO_PREFIX_CACHE, check_engine_options
from pytest_llenergy.backends.gguf_files import FLOATS, converted_gguf, describe_gguf_weights
from pytest_llenergy.backends.models import ModelSource, check_context_length, gguf_hint
from pytest_llenergy.backends.precision import captured_log, list_types
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo, Precision
from pytest_llenergy.model.timeline import RequestTimeline

#: Longest path in ``sockaddr_un.sun_path`` on every system, without the closing zero (104 bytes on macOS).
MAX_SOCKET_PATH_BYTES = 103

#: Values of ``verbosity``: log errors only, or also what llama.cpp finds and decides while it loads a model.
VERBOSITY_ERRORS, VERBOSITY_LOADING = 1, 4

#: How long its log may lag behind the loaded model, and how often to look (seconds).
LOG_TIMEOUT_S, LOG_POLL_S = 10.0, 0.01

#: Values of the load option ``attention``, with llama.cpp's names.
ATTENTIONS = {"flash": "ENABLED", "eager": "DISABLED"}

#: Values of ``kv_cache_dtype`` besides ``FLOATS`` (``kv_cache_types``, common/arg.cpp).
QUANTISED_KV_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

_BY_BATCH = "it is set for each batch"
#: Fields of llama.cpp's parameters that are set here, with the reason.
RESERVED = {
    **dict.fromkeys(("n_parallel", "n_ctx", "n_batch", "kv_unified", "fit_params", "ctx_shift"), _BY_BATCH),
    **dict.fromkeys(
        ("cache_prompt", "cache_idle_slots", "cache_ram_mib", "n_cache_reuse", "n_ctx_checkpoints"),
        NO_PREFIX_CACHE,
    ),
    **dict.fromkeys(("cpuparams", "cpuparams_batch"), "use --energy-threads"),
    **dict.fromkeys(("model", "hostnames", "port", "ui", "n_threads_http", "verbosity"), "it is set here"),
    **dict.fromkeys(("api_keys", "hf_token"), "it is a secret, and options are recorded"),
    **{"cache_type_k": "use kv_cache_dtype", "cache_type_v": "use kv_cache_dtype"},
    **{"flash_attn_type": "use attention", "lora_adapters": "use lora", "n_gpu_layers": "it has no GPU"},
}

#: Cache sizes are multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256

#: Types in which ggml multiplies weights with activations, by the types of the weights (``vec_dot_type`` in
#: ggml-cpu.c). It adds up in float32.
ACTIVATIONS = {
    **{"float16": "float16", "bfloat16": "bfloat16"},
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4"), "q8_0"),
    **dict.fromkeys(("q4_1", "q5_1"), "q8_1"),
    **dict.fromkeys(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "tq1_0", "tq2_0"), "q8_k"),
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), "q8_k"),
}

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
        options=("dtype", "kv_cache_dtype", "attention", "chunked_prefill", "lora"),
        passes="xllamacpp.CommonParams",
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
            "options_prefix_cache": NO_PREFIX_CACHE,
            "options_quantization": "it reads the weights as the file stores them; name another file",
            "options_speculative": "not offered by this adapter, whose steps have one token of each prompt",
            "options_compile": "its kernels are compiled already",
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


SMALLEST = Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP)


@dataclass(frozen=True)
class Settings:
    """Load options, checked, and the place of the rank.

    Attributes:
        options: The load options as given.
        native: Those that are fields of ``xllamacpp.CommonParams``.
        kv_type: ggml's name of the type of keys and values; None for llama.cpp's default.
        attention: Key of ``ATTENTIONS``; None to let llama.cpp decide.
        step: Prompt tokens of one step; None for all of a batch.
        lora: File of a LoRA adapter.
    """

    threads: int
    scratch: str | None
    options: Mapping[str, Any]
    native: Mapping[str, Any]
    kv_type: str | None
    attention: str | None
    step: int | None
    lora: str | None

    @classmethod
    def parse(cls, options: Mapping[str, Any], context: RankContext) -> Settings:
        """Check the load options.

        Raises:
            BackendError: If llama.cpp does not take one of them.
        """
        import xllamacpp

        defaults = xllamacpp.CommonParams()
        names = [name for name in dir(defaults) if name[0] != "_" and not callable(getattr(defaults, name))]
        native = {name: value for name, value in options.items() if name not in SPEC.capabilities.options}
        where = f"xllamacpp.CommonParams of {xllamacpp.__version__}"
        check_engine_options(
            "llama-cpp", native, names, declared=SPEC.capabilities.options, where=where, reserved=RESERVED
        )
        for name, value in native.items():
            _set_parameter(defaults, name, value)
        dtype, kv_type = options.get("dtype"), options.get("kv_cache_dtype", options.get("dtype"))
        attention, step, lora = (options.get(name) for name in ("attention", "chunked_prefill", "lora"))
        for name, value, known in (
            ("dtype", dtype, tuple(FLOATS)),
            ("kv_cache_dtype", kv_type, (*FLOATS, *QUANTISED_KV_TYPES)),
            ("attention", attention, tuple(ATTENTIONS)),
        ):
            if value is not None and value not in known:
                raise BackendError(f"llama-cpp: {name} is {value!r}, needs one of {', '.join(known)}")
        if step is not None and (type(step) is not int or step < 1) and step is not False:
            raise BackendError(f"llama-cpp: chunked_prefill is {step!r}, needs False or the tokens of a step")
        if lora is not None and not Path(str(lora)).is_file():
            raise BackendError(f"llama-cpp: lora is {lora!r}, needs a .gguf file of an adapter")
        return cls(
            threads=context.threads,
            scratch=context.scratch,
            options=options,
            native=native,
            kv_type=None if kv_type is None else FLOATS.get(kv_type, kv_type),
            attention=attention,
            step=step or None,
            lora=None if lora is None else str(lora),
        )


class Server:
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
                params = _parameters(xllamacpp, file, self._path, capacity, settings)
                params.verbosity = VERBOSITY_LOADING if describes else VERBOSITY_ERRORS
                try:
                    self._server: Any = xllamacpp.Server(params)
                except RuntimeError as error:
                    reason = _first_error(log) or str(error)
                    given = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
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


def _parameters(xllamacpp: Any, file: str, path: str, capacity: Capacity, settings: Settings) -> Any:
    params = xllamacpp.CommonParams()
    for name, value in settings.native.items():
        _set_parameter(params, name, value)
    params.model.path = file
    params.hostnames = [path]
    params.ui = False
    params.n_threads_http = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
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
    if settings.kv_type is not None:
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings.kv_type.upper()}")
        params.cache_type_k = params.cache_type_v = kind
    if settings.attention is not None:
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{ATTENTIONS[settings.attention]}")
    if settings.lora is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(settings.lora, 1.0)]
    return params


def _set_parameter(params: Any, name: str, value: object) -> None:
    """Set a field of llama.cpp's parameters; enumerations by the name of a value.

    Raises ``BackendError`` for a value of another type.
    """
    current = getattr(params, name)
    members = getattr(type(current), "__members__", None)
    if members is not None:
        if value not in members:
            raise BackendError(f"llama-cpp: {name} is {value!r}, needs one of {', '.join(members)}")
        setattr(params, name, members[value])
    elif type(value) is type(current) or (isinstance(current, float) and type(value) is int):
        setattr(params, name, value)
    else:
        raise BackendError(f"llama-cpp: {name} is {value!r}, needs {type(current).__name__}")


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

        settings = self._settings = Settings.parse(options, context)
        dtype = options.get("dtype")
        file = Path(model.location) if dtype is None else converted_gguf("llama-cpp", model, str(dtype))
        self._file, self._label = str(file), model.label
        # Loaded once to print what it does, which would disturb a measurement; ``prepare`` loads it again.
        self._server: Server | None = self._serve(SMALLEST, describes=True)
        assert self._server.precision is not None
        weights = describe_gguf_weights(file)
        kinds = set((weights or "").split(", "))
        precision = msgspec.structs.replace(
            self._server.precision,
            weights=weights,
            compute="float32",
            activations=", ".join(sorted({ACTIVATIONS[each] for each in kinds if each in ACTIVATIONS}))
            or "none",
        )
        return BackendInfo(
            name="llama-cpp",
            version=str(xllamacpp.__version__),
            model=model.label,
            dtype=weights,
            precision=precision,
            options={
                **{name: str(value) for name, value in options.items()},
                "prefix_caching": False,
                "flash_attention": self._server.attention,
                "threads": context.threads,
                "device": "CPU",
                # Set by ``_with_capacity`` for each batch, whose tokens are in the record.
                "n_ctx": f"what the batch needs, in steps of {CONTEXT_STEP} a prompt",
                "n_batch": settings.step or f"the prompts of the batch, in steps of {CONTEXT_STEP}",
                "n_ubatch": f"n_batch, {options.get('n_ubatch', xllamacpp.CommonParams().n_ubatch)} at most",
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
        check_lengths("llama-cpp", [len(row) for row in rows], params.max_new_tokens, None)
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
            self._server = self._serve(SMALLEST)
        return self._server

    def _with_capacity(self, rows: list[list[int]], new: int) -> Server:
        needed = max(map(len, rows)) + new
        capacity = Capacity(
            prompts=len(rows),
            tokens=-(-needed // CONTEXT_STEP) * CONTEXT_STEP,
            step=self._settings.step or -(-sum(map(len, rows)) // CONTEXT_STEP) * CONTEXT_STEP,
        )
        if self._server is None or self._server.capacity != capacity or self._server.precision is not None:
            self.close()
            self._server = self._serve(capacity)
        limit = int(self._server.request("GET", "/props")["default_generation_settings"]["n_ctx"])
        check_context_length("llama-cpp", needed, limit)
        return self._server

    def _serve(self, capacity: Capacity, *, describes: bool = False) -> Server:
        return Server(self._file, self._label, capacity, self._settings, describes=describes)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(self._tokens(text)) for text in texts]

    def synchronize(self) -> None:
        """The answer arrives when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
