# SPDX-License-Identifier: Apache-2.0
"""One static batch through ``generate``, with the time of each step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.model.timeline import RequestTimeline


class StepClock:
    """A streamer that only notes when each decoding step had its tokens.

    ``generate`` calls ``put`` once with the prompt and then after each step, when the tokens have
    been copied to the host, that is after the device has finished the step. A step gives each sequence one
    token, ``(batch,)``, or where tokens are drafted the one sequence several, ``(1, tokens)``.
    """

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Note the time of a step, once for each token that it gave a sequence."""
        if self._prompt_seen:
            count = tokens.shape[1] if tokens.dim() == 2 else 1
            self.steps_ns.extend([time.monotonic_ns()] * count)
        self._prompt_seen = True

    def end(self) -> None:
        """The last step has been seen already."""


def generation_config(params: GenerationParams, ends: frozenset[int], pad: int, **more: Any) -> Any:
    """A new ``GenerationConfig`` that says it all: nothing is left to the defaults of a model."""
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {"do_sample": False}
    if params.do_sample:
        sampling = {
            "do_sample": True,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
        }
    return GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        cache_implementation="static" if params.cache == "static" else None,
        **sampling,
        **more,
    )


@dataclass
class TransformersJob:
    """A padded batch on the device.

    ``ends`` are the tokens that end a sequence, ``more`` is what ``generate`` is given besides.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]
    more: dict[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Any, StepClock]:
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        with torch.inference_mode():
            output = self.model.generate(
                **self.inputs, generation_config=self.config, streamer=clock, **self.more
            )
        return output, clock

    def result(self, outcome: tuple[Any, StepClock]) -> Generation:
        output, clock = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [_produced(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        steps_ns = clock.steps_ns
        requests = [
            RequestTimeline(
                input_tokens=int(length),
                output_tokens=len(ids),
                first_token_ns=steps_ns[0],
                last_token_ns=steps_ns[len(ids) - 1],
                token_ns=tuple(steps_ns[: len(ids)]),
            )
            for length, ids in zip(mask.sum(dim=1).tolist(), token_ids, strict=True)
        ]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


def _produced(row: list[int], ends: frozenset[int]) -> list[int]:
    """A row up to and including the first token that ended it; what follows is padding."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
