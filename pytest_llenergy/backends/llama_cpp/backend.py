# SPDX-License-Identifier: Apache-2.0
"""Loading a GGUF file, and batches of token ids through the server's ``/completion``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.llama_cpp.server import Room, Server
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

#: The engine's caches come in multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
PADDING = 256

#: ``LLAMA_DEFAULT_SEED``, which stands for a random one.
SEED_LIMIT = 2**32 - 1

#: What is asked of an answer; without this it repeats the prompt and every setting.
FIELDS = ("index", "content", "tokens", "tokens_predicted", "tokens_evaluated", "truncated", "timings")


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
                "n_ctx": f"what the batch needs, in steps of {PADDING} a prompt",
                "n_batch": f"the prompts of the batch, in steps of {PADDING}",
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
            "response_fields": FIELDS,
        }
        return LlamaCppJob(server, request)

    def _tokens(self, prompt: str) -> list[int]:
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return list(self._any_server().ask("POST", "/tokenize", body)["tokens"])

    def _any_server(self) -> Server:
        if self._server is None:
            self._server = self._serve(Room(prompts=1, tokens=PADDING, step=PADDING))
        return self._server

    def _with_room(self, rows: list[list[int]], new: int) -> Server:
        needed = max(map(len, rows)) + new
        room = Room(
            prompts=len(rows),
            tokens=-(-needed // PADDING) * PADDING,
            step=-(-sum(map(len, rows)) // PADDING) * PADDING,
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

    def _serve(self, room: Room) -> Server:
        return Server(self._file, self._label, room, self._threads, self._scratch)

    def synchronize(self) -> None:
        """The answer comes when the CPU has finished."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
