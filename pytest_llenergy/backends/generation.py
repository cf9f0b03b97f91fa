# SPDX-License-Identifier: Apache-2.0
"""Generating text: how, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import msgspec

from pytest_llenergy.backends.params import Params
from pytest_llenergy.model.timeline import RequestTimeline


class GenerationParams(Params, frozen=True):
    """How to generate; recorded whole.

    ``ignore_eos`` makes every sequence ``max_new_tokens`` long, which keeps the work of a benchmark
    constant. ``stop_token_ids`` end a sequence like its end-of-sequence token. ``seed`` is set anew
    before every round. ``cache`` is the kind of key-value cache. Sampling needs ``do_sample=True``.
    """

    task: ClassVar[str] = "generate"

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 50
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache: Literal["dynamic", "static"] = "dynamic"

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        yield "max_new_tokens", self.max_new_tokens >= 1, "1 or more"
        yield "temperature", self.temperature > 0, "more than 0; do_sample=False is greedy"
        yield "top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"
        yield "top_k", self.top_k >= 1, "1 or more"
        yield "seed", self.seed >= 0, "0 or more"
        yield "stop_token_ids", min(self.stop_token_ids, default=0) >= 0, "ids of 0 or more"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What ``generate`` returns: one entry a prompt, in the order of the prompts.

    ``token_ids`` are the output tokens as produced, without prompt and padding, with the token that
    ended the sequence. ``requests`` holds counts and times.
    """

    texts: list[str]
    token_ids: list[list[int]]
    requests: list[RequestTimeline]

    @property
    def output_tokens(self) -> int:
        """Output tokens of all sequences."""
        return sum(request.output_tokens for request in self.requests)

    @staticmethod
    def merge(parts: Sequence[Generation]) -> Generation:
        """Join what the ranks made of consecutive parts of a batch."""
        if len(parts) == 1:
            return parts[0]
        return Generation(
            texts=[text for part in parts for text in part.texts],
            token_ids=[ids for part in parts for ids in part.token_ids],
            requests=[request for part in parts for request in part.requests],
        )
