# SPDX-License-Identifier: Apache-2.0
"""Static batches of transformers, with a timestamp per step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.batches import batch_result
from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.backends.options import show_options
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.errors import BackendError

#: What transformers raises for options and combinations that it does not take.
INVALID_VALUE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


@contextmanager
def translate_value_errors(passed: Mapping[str, Any]) -> Iterator[None]:
    """Raise what transformers raises for values that it checks late as ``BackendError``."""
    try:
        yield
    except INVALID_VALUE as error:
        given = f" with {show_options(passed)}" if passed else ""
        raise BackendError(f"transformers cannot generate{given}: {first_error_line(error)}") from error


class StepClock:
    """A streamer that records when each decoding step produced its tokens.

    ``generate`` calls ``put`` once with the prompt and then after each step, when its tokens have been copied
    to the host, so the device has finished the step. A step gives each sequence one token, shape
    ``(batch,)``; with drafted tokens it gives the only sequence several, shape ``(1, tokens)``.
    """

    def __init__(self) -> None:
        self.tokens_ns: list[int] = []
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Record the time of a step, once per token that it gave a sequence."""
        if self._prompt_seen:
            count = tokens.shape[1] if tokens.dim() == 2 else 1
            self.tokens_ns.extend([time.monotonic_ns()] * count)
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the last step was already recorded."""


def generation_config(params: GenerationParams, ends: frozenset[int], pad: int, **keywords: Any) -> Any:
    """Return a complete ``GenerationConfig``, which leaves nothing to the defaults of a model.

    ``ends`` end a sequence, ``pad`` fills ended ones.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        cache_implementation="static" if params.cache == "static" else None,
        do_sample=params.do_sample,
        **params.drawn,
        **keywords,
    )


@dataclass
class TransformersJob:
    """A padded batch on the device.

    Attributes:
        ends: Tokens that end a sequence.
        passed: Options of the library that the test gave, in ``config`` too.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]
    passed: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Any, StepClock]:
        """Return the token ids with prompts, and the times of the steps."""
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        with torch.inference_mode(), translate_value_errors(self.passed):
            output = self.model.generate(**self.inputs, generation_config=self.config, streamer=clock)
        return output, clock

    def result(self, outcome: tuple[Any, StepClock]) -> Generation:
        output, clock = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [cut_at_end(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return batch_result(texts, token_ids, mask.sum(dim=1).tolist(), clock.tokens_ns)
