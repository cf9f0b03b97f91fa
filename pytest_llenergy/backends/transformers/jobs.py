# SPDX-License-Identifier: Apache-2.0
"""Static batches of transformers, with a timestamp per step and drafted tokens counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.backends.options import show_options
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.timeline import RequestTimeline

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

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        """Record the time of a step of beam search, which takes no streamer but asks whether to stop."""
        import torch

        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.tokens_ns.append(time.monotonic_ns())
        self.steps += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


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
        **params.extras,
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
        watch = {"stopping_criteria": [clock]} if self._beams > 1 else {"streamer": clock}
        counter = DraftCounter(self.inputs["input_ids"].shape[1])
        with torch.inference_mode(), ExitStack() as stack:
            if self.drafts:
                hook = self.model.register_forward_pre_hook(counter, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(translate_value_errors(self.passed))
            output = self.model.generate(**self.inputs, generation_config=self.config, **watch)
        return output, clock, counter.drafted

    def result(self, outcome: tuple[Any, StepClock, int]) -> Generation:
        output, clock, drafted = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [cut_at_end(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        requests = [
            self._timeline(int(length), len(ids), clock)
            for length, ids in zip(mask.sum(dim=1).tolist(), token_ids, strict=True)
        ]
        if self.drafts:
            # Each step makes one token itself; the rest of its tokens were drafted.
            accepted = len(clock.tokens_ns) - clock.steps
            counted = {"drafted_tokens": drafted, "accepted_tokens": accepted}
            requests = [msgspec.structs.replace(request, **counted) for request in requests]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)

    @property
    def _beams(self) -> int:
        return int(self.config.num_beams or 1)

    def _timeline(self, length: int, count: int, clock: StepClock) -> RequestTimeline:
        # Which beam is the best is known at the end only.
        is_beam = self._beams > 1
        return RequestTimeline(
            input_tokens=length,
            output_tokens=count,
            first_token_ns=clock.tokens_ns[0],
            last_token_ns=clock.tokens_ns[-1 if is_beam else count - 1],
            token_ns=() if is_beam else tuple(clock.tokens_ns[:count]),
            computed_tokens=self._beams * clock.steps if is_beam else None,
        )


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
