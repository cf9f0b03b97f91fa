# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp inside the rank. Reads GGUF files; needs no torch.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.batches import check_lengths, encode_prompts
from pytest_llenergy.backends.gguf_files import FLOATS, converted_gguf, describe_gguf_weights
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import captured_log, list_types
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.backends.timeouts import LOG_POLL_S, LOG_TIMEOUT_S
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.record.timeline import RequestTimeline

#: Requested fields of an answer; by default it repeats the prompt and every setting.
RESPONSE_FIELDS = ["index", "content", "tokens", "tokens_predicted", "tokens_evaluated"]
RESPONSE_FIELDS += ["truncated", "timings"]

#: Cache sizes are multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256

#: Value of ``verbosity``: log errors only.
ERRORS_ONLY = 1


def refuses(model: ModelSource) -> str | None:
    """Return why llama.cpp cannot read a model. It reads GGUF files."""
    return None if model.kind == "gguf" else f"llama-cpp reads .gguf files, not {model.label}"


SPEC = BackendSpec(
    name="llama-cpp",
    factory="pytest_llenergy.backends.llama_cpp:LlamaCppBackend",
    requires=("xllamacpp", "gguf"),
    install="pip install 'pytest-llenergy[llama-cpp]'",
    capabilities=Capabilities(
        data=True,
        options=("dtype",),
        passes=True,
        timestamps="step",
    ),
    refuses=refuses,
)


@dataclass(frozen=True)
class Capacity:
    """The batch that a server can hold: its prompts, the tokens of each with its output, those of a step."""

    prompts: int
    tokens: int
    step: int


SMALLEST = Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP)


class LlamaServer:
    """A loaded model, for batches of some capacity."""

    def __init__(
        self, file: Path, capacity: Capacity, options: Mapping[str, Any], context: RankContext
    ) -> None:
        import xllamacpp

        self.capacity = capacity
        # Accessible to this user only: no port is open.
        self.directory: str = tempfile.mkdtemp(prefix="llenergy-llama-", dir=context.scratch)
        self._path = str(Path(self.directory) / "s.sock")
        try:
            params = _server_parameters(options, capacity, context.threads)
            params.model.path = str(file)
            params.hostnames = [self._path]
            #: The types of its cache.
            self.kv_cache = list_types(
                Counter([_type_of(params.cache_type_k), _type_of(params.cache_type_v)])
            )
            with captured_log(2, self.directory) as log:
                try:
                    self._server: Any = xllamacpp.Server(params)
                except RuntimeError as error:
                    raise RuntimeError(_await_error(log) or str(error)) from error
            # Answered by the server's loop. Closing before the loop has started would wait for it for ever.
            with suppress(BackendError):
                self.request("GET", "/slots")
        except BaseException:
            # No other code knows of the directory yet.
            self.close()
            raise

    def request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, such as to ``/completion``, and return the decoded answer."""
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("localhost")
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.connect(self._path)
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
    setattr(params, name, members.get(value, value) if isinstance(value, str) else value)


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


@dataclass(frozen=True)
class BatchReply:
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

    server: LlamaServer
    request: dict[str, Any]

    def run(self) -> BatchReply:
        sent_ns = time.monotonic_ns()
        answer = self.server.request("POST", "/completion", self.request)
        return BatchReply(answer if isinstance(answer, list) else [answer], sent_ns, time.monotonic_ns())

    def result(self, outcome: BatchReply) -> Generation:
        sequences = sorted(outcome.sequences, key=lambda each: int(each["index"]))
        start_ns = outcome.start_ns()
        requests = []
        for prompt, sequence in zip(self.request["prompt"], sequences, strict=True):
            self._check(prompt, sequence)
            first_ns = last_ns = None
            if start_ns is not None:
                first_ns = start_ns + round(sequence["timings"]["prompt_ms"] * 1e6)
                last_ns = first_ns + round(sequence["timings"]["predicted_ms"] * 1e6)
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(sequence["tokens"]),
                    first_token_ns=first_ns,
                    last_token_ns=last_ns,
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
        evaluated, predicted = sequence["tokens_evaluated"], sequence["tokens_predicted"]
        cached, truncated = sequence["timings"]["cache_n"], sequence["truncated"]
        made = len(sequence["tokens"])
        if (evaluated, predicted, cached, truncated) != (len(prompt), made, 0, False):
            raise BackendError(
                f"llama-cpp: for a prompt of {len(prompt)} tokens and an answer of {made} its server reports "
                f"evaluated {evaluated}, predicted {predicted}, from a cache {cached}, truncated {truncated}"
            )


class LlamaCppBackend:
    """``xllamacpp.Server`` with its prompt cache switched off.

    The capacity is fixed when the model is loaded, so a batch that needs another capacity reloads it.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import xllamacpp

        self._server: LlamaServer | None = None
        self._options, self._context = options, context
        dtype = options.get("dtype")
        file = Path(model.location) if dtype is None else converted_gguf("llama-cpp", model, str(dtype))
        self._file, self._model = file, model
        self._server = self._serve(SMALLEST)
        weights = describe_gguf_weights(file)
        return BackendInfo(
            name="llama-cpp",
            version=str(xllamacpp.__version__),
            model=model.label,
            dtype=weights,
            precision=Precision(weights=weights, compute="float32", kv_cache=self._server.kv_cache),
            options={
                **{name: str(value) for name, value in options.items()},
                "prefix_caching": False,
                "threads": context.threads,
                "device": "CPU",
                # Set by ``_with_capacity`` for each batch, whose tokens are in the record.
                "n_ctx": f"what the batch needs, in steps of {CONTEXT_STEP} a prompt",
                "n_batch": f"the prompts of the batch, in steps of {CONTEXT_STEP}",
                "n_ubatch": f"n_batch, {options.get('n_ubatch', xllamacpp.CommonParams().n_ubatch)} at most",
                "system": " ".join(str(xllamacpp.get_system_info()).split()),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> LlamaCppJob:
        if params.stop_token_ids:
            raise BackendError("llama-cpp: stop_token_ids are not supported: its server stops at texts")
        rows = encode_prompts("llama-cpp", self._tokens, prompts)
        server = self._with_capacity(rows, params.max_new_tokens)
        request = {
            # The order of transformers. llama.cpp's default adds penalties and min_p.
            "samplers": ["temperature", "top_k", "top_p"] if params.do_sample else ["temperature"],
            **(params.drawn or {"temperature": 0.0}),
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
        if self._server is None:
            self._server = self._serve(SMALLEST)
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return list(self._server.request("POST", "/tokenize", body)["tokens"])

    def _with_capacity(self, rows: list[list[int]], new: int) -> LlamaServer:
        lengths = [len(row) for row in rows]
        capacity = Capacity(
            prompts=len(rows),
            tokens=_round_up(max(lengths) + new),
            step=_round_up(sum(lengths)),
        )
        if self._server is None or self._server.capacity != capacity:
            self.close()
            self._server = self._serve(capacity)
        limit = int(self._server.request("GET", "/props")["default_generation_settings"]["n_ctx"])
        check_lengths("llama-cpp", lengths, new, limit)
        return self._server

    def _serve(self, capacity: Capacity) -> LlamaServer:
        with translate_load_errors("llama-cpp", self._model, self._options):
            return LlamaServer(self._file, capacity, self._options, self._context)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("llama-cpp", self._tokens, texts)]

    def synchronize(self) -> None:
        """The answer arrives when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _round_up(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
