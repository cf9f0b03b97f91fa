# SPDX-License-Identifier: Apache-2.0
"""The backend: loads a model, prepares batches, and reads the answers to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.batches import check_lengths, encode_prompts
from pytest_llenergy.backends.gguf_files import converted_gguf, describe_gguf_weights
from pytest_llenergy.backends.llama_cpp.server import CONTEXT_STEP, SMALLEST, Capacity, LlamaServer
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.record.timeline import RequestTimeline

#: Requested fields of an answer; by default it repeats the prompt and every setting.
RESPONSE_FIELDS = ["index", "content", "tokens", "tokens_predicted", "tokens_evaluated"]
RESPONSE_FIELDS += ["truncated", "timings"]


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
        self._file, self._label = str(file), model.label
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
        return LlamaServer(self._file, self._label, capacity, self._options, self._context)

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
