# SPDX-License-Identifier: Apache-2.0
"""The backend: loads a model, prepares batches, and reads the answers to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.batches import check_lengths, encode_prompts
from pytest_llenergy.backends.gguf_files import converted_gguf, describe_gguf_weights
from pytest_llenergy.backends.llama_cpp.options import CONTEXT_STEP, SMALLEST, Capacity, Settings
from pytest_llenergy.backends.llama_cpp.server import LlamaServer
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

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
        self._server: LlamaServer | None = self._serve(SMALLEST, describes=True)
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
        rows = encode_prompts("llama-cpp", self._tokens, prompts)
        server = self._with_capacity(rows, params.max_new_tokens)
        sampling: dict[str, Any] = {"samplers": ["temperature"], "temperature": 0.0}
        if params.do_sample:
            # The order of transformers. llama.cpp's default adds penalties and min_p.
            sampling = {
                "samplers": ["temperature", "top_k", "top_p"],
                **params.drawn,
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

    def _any_server(self) -> LlamaServer:
        if self._server is None:
            self._server = self._serve(SMALLEST)
        return self._server

    def _with_capacity(self, rows: list[list[int]], new: int) -> LlamaServer:
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
        check_lengths("llama-cpp", list(map(len, rows)), new, limit)
        return self._server

    def _serve(self, capacity: Capacity, *, describes: bool = False) -> LlamaServer:
        return LlamaServer(self._file, self._label, capacity, self._settings, describes=describes)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("llama-cpp", self._tokens, texts)]

    def synchronize(self) -> None:
        """The answer arrives when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
