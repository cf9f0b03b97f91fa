# SPDX-License-Identifier: Apache-2.0
"""Static batches of transformers, with a timestamp per step and drafted tokens counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_llenergy.backends.batches import batch_result
from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.backends.options import show_options
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive

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
        self.steps = 0
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Record the time of a step, once per token that it gave a sequence."""
        if self._prompt_seen:
            count = tokens.shape[1] if tokens.dim() == 2 else 1
            self.tokens_ns.extend([time.monotonic_ns()] * count)
            self.steps += 1
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the last step was already recorded."""


class DraftCounter:
    """A hook of the model that counts the drafted tokens that it checks.

    The first forward pass takes the prompt and a draft, each later one the last token and a draft.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.drafted = 0
        self._known = prompt_tokens

    def __call__(self, _model: Any, _args: Any, keywords: dict[str, Any]) -> None:
        self.drafted += keywords["input_ids"].shape[1] - self._known
        self._known = 1


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
        drafts: Whether tokens are drafted, for the only prompt.
        passed: Options of the library that the test gave, in ``config`` too.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]
    drafts: bool = False
    passed: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Any, StepClock, int]:
        """Return the token ids with prompts, the times of the steps, and the number of drafted tokens."""
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        counter = DraftCounter(self.inputs["input_ids"].shape[1])
        with torch.inference_mode(), ExitStack() as stack:
            if self.drafts:
                hook = self.model.register_forward_pre_hook(counter, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(translate_value_errors(self.passed))
            output = self.model.generate(**self.inputs, generation_config=self.config, streamer=clock)
        return output, clock, counter.drafted

    def result(self, outcome: tuple[Any, StepClock, int]) -> Generation:
        output, clock, drafted = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [cut_at_end(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        made = batch_result(texts, token_ids, mask.sum(dim=1).tolist(), clock.tokens_ns)
        if self.drafts:
            # Each step makes one token itself; the rest of its tokens were drafted.
            accepted = len(clock.tokens_ns) - clock.steps
            counted = {"drafted_tokens": drafted, "accepted_tokens": accepted}
            requests = [msgspec.structs.replace(request, **counted) for request in made.requests]
            made = msgspec.structs.replace(made, requests=requests)
        return made


def load_adapter(model: Any, directory: str) -> dict[str, Primitive]:
    """Add a LoRA adapter to a model, unmerged. Returns what goes into the record."""
    try:
        model.load_adapter(directory)
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise BackendError(f"transformers: lora {directory}: {first_error_line(error)}") from error
    parameters = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    if not parameters:
        raise BackendError(f"transformers: lora {directory} adds no parameters to {type(model).__name__}")
    return {"lora_parameters": parameters}
