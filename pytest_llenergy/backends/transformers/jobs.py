# SPDX-License-Identifier: Apache-2.0
"""Jobs of transformers: static batches with a timestamp per step, assisted generation, embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.engine_options import PROMPT_LOOKUP, Speculative, show_options
from pytest_llenergy.backends.models import explain_load_error, first_error_line, resolve_model
from pytest_llenergy.backends.tasks import (
    Embedding,
    EmbeddingParams,
    Generation,
    GenerationParams,
    cut_at_end,
)
from pytest_llenergy.backends.transformers.parallel import load_complete
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.timeline import RequestTimeline

#: How a model drafts, set explicitly so that no other default applies. With the threshold of 0 it drafts as
#: many tokens as requested, as in other libraries; transformers' own default stops where it is unsure.
DRAFTING: dict[str, Primitive] = {
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}

#: What transformers raises for a value of another type or out of range.
INVALID_VALUE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def translate_value_errors(passed: Mapping[str, Any]) -> Iterator[None]:
    """Raise what transformers raises for values of ``passed`` as ``BackendError``.

    Their names are checked when the model is loaded; transformers checks some values later.
    """
    try:
        yield
    except INVALID_VALUE as error:
        if not passed:
            raise
        raise BackendError(
            f"transformers cannot generate with {show_options(passed)}: {first_error_line(error)}"
        ) from error


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

    Args:
        params: Parameters of the call.
        ends: Tokens that end a sequence.
        pad: Token that fills ended sequences.
        **keywords: Further fields of ``GenerationConfig``.
    """
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {"do_sample": False, **params.extras}
    if params.do_sample:
        sampling |= {
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
        **keywords,
    )


@dataclass(frozen=True)
class TransformersOutcome:
    """Token ids with prompts, the times of the steps, and the number of drafted tokens."""

    output: Any
    clock: StepClock
    drafted: int


@dataclass
class TransformersJob:
    """A padded batch on the device.

    Attributes:
        ends: Tokens that end a sequence.
        keywords: Further arguments of ``generate``.
        drafts: Whether tokens are drafted, for the only prompt.
        passed: Options of the library that the test gave, in ``config`` too.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]
    keywords: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    passed: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> TransformersOutcome:
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
            output = self.model.generate(
                **self.inputs, generation_config=self.config, **watch, **self.keywords
            )
        return TransformersOutcome(output, clock, counter.drafted)

    def result(self, outcome: TransformersOutcome) -> Generation:
        mask, clock = self.inputs["attention_mask"], outcome.clock
        token_ids = [cut_at_end(row, self.ends) for row in outcome.output[:, mask.shape[1] :].tolist()]
        lengths = mask.sum(dim=1).tolist()
        requests = [
            self._timeline(int(length), len(ids), outcome)
            for length, ids in zip(lengths, token_ids, strict=True)
        ]
        if self.drafts:
            # Each step makes one token itself; the rest of its tokens were drafted.
            accepted = len(clock.tokens_ns) - clock.steps
            counted = {"drafted_tokens": outcome.drafted, "accepted_tokens": accepted}
            requests = [msgspec.structs.replace(request, **counted) for request in requests]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)

    @property
    def _beams(self) -> int:
        return int(self.config.num_beams or 1)

    def _timeline(self, length: int, count: int, outcome: TransformersOutcome) -> RequestTimeline:
        tokens_ns = outcome.clock.tokens_ns
        if self._beams > 1:
            # Which beam is the best is known at the end.
            return RequestTimeline(
                input_tokens=length,
                output_tokens=count,
                first_token_ns=tokens_ns[0],
                last_token_ns=tokens_ns[-1],
                computed_tokens=self._beams * outcome.clock.steps,
            )
        return RequestTimeline(
            input_tokens=length,
            output_tokens=count,
            first_token_ns=tokens_ns[0],
            last_token_ns=tokens_ns[count - 1],
            token_ns=tuple(tokens_ns[:count]),
        )


def prompt_lookup_options(draft: Speculative | None) -> dict[str, Primitive]:
    """Return what drafts from the prompt, for ``GenerationConfig`` and records; empty if not requested."""
    if draft is None or draft.kind != PROMPT_LOOKUP:
        return {}
    return {"prompt_lookup_num_tokens": draft.num_tokens, "max_matching_ngram_size": draft.max_ngram}


def load_assistant(
    draft: Speculative, model: Any, passed: Mapping[str, Any]
) -> tuple[Any, dict[str, Primitive]]:
    """Load a model that drafts, in the dtype and on the device of the model.

    Returns it and what goes into the record.

    Args:
        draft: How it drafts.
        model: The model that checks.
        passed: Attributes of ``GenerationConfig`` that the test gives.

    Raises:
        ModelError: If it cannot be loaded.
        BackendError: If its vocabulary differs.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import is_sklearn_available

    try:
        source = resolve_model(draft.model)
    except ModelError as error:
        raise ModelError(f"speculative: {error}") from None
    try:
        path = pretrained_path(source)
        assistant: Any = load_complete(AutoModelForCausalLM, path, dtype=model.dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"speculative: {explain_load_error(source, error)}") from error
    sizes = [each.config.get_text_config().vocab_size for each in (assistant, model)]
    if sizes[0] != sizes[1]:
        raise BackendError(
            f"transformers: speculative: {source.label} has a vocabulary of {sizes[0]} tokens and the model "
            f"one of {sizes[1]}; name a model with the same tokenizer"
        )
    settings = DRAFTING | {name: value for name, value in passed.items() if name in DRAFTING}
    settings["num_assistant_tokens"] = draft.num_tokens
    assistant.generation_config = GenerationConfig(**settings)
    adapts = bool(settings["assistant_confidence_threshold"]) and bool(is_sklearn_available())
    recorded = {"draft_model": source.label, **settings, "threshold_adapts": adapts}
    return assistant.to(model.device).eval(), recorded


def load_adapter(model: Any, directory: str) -> dict[str, Primitive]:
    """Add a LoRA adapter to a model, unmerged. Returns what goes into the record.

    Raises:
        BackendError: If it does not fit the model.
    """
    try:
        model.load_adapter(directory)
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise BackendError(f"transformers: lora {directory}: {first_error_line(error)}") from error
    parameters = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    if not parameters:
        raise BackendError(f"transformers: lora {directory} adds no parameters to {type(model).__name__}")
    return {"lora_parameters": parameters}


def is_encoder(config: Any) -> bool:
    """Whether a model was saved without a head that predicts the next token.

    ``AutoModelForCausalLM`` would load such a model too, with a randomly initialised head.
    """
    from transformers.models.auto import modeling_auto as auto

    saved = set(config.architectures or ())
    generating = _class_names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    encoding = _class_names(auto.MODEL_MAPPING_NAMES) | _class_names(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return not config.is_encoder_decoder and bool(saved & encoding) and not saved & generating


def prepare_embedding(
    model: Any, tokenizer: Any, texts: Sequence[str], params: EmbeddingParams, device: str
) -> EmbeddingJob:
    """Prepare a padded batch.

    Args:
        model: The loaded model.
        tokenizer: Its tokenizer.
        texts: The texts to embed.
        params: Parameters of the call.
        device: Device of the inputs.

    Raises:
        BackendError: If a text has no tokens or too many.
    """
    # With padding on the right, tokens keep the positions that they have alone.
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right").to(device)
    lengths = [int(length) for length in inputs["attention_mask"].sum(dim=1)]
    if min(lengths) == 0:
        raise BackendError("transformers: a text has no tokens; leave empty texts out")
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
    fits = min(limit for limit in limits if limit is not None)
    if max(lengths) > fits:
        raise BackendError(
            f"transformers: a text has {max(lengths)} tokens and the model takes {fits}; shorten the text, "
            "texts are not truncated"
        )
    # The base model of a generating model lacks only the head.
    return EmbeddingJob(model.base_model, dict(inputs), lengths, params)


@dataclass
class EmbeddingJob:
    """A padded batch on the device. ``lengths`` are the texts' token counts without padding."""

    model: Any
    inputs: dict[str, Any]
    lengths: list[int]
    params: EmbeddingParams

    def run(self) -> Any:
        import torch

        with torch.inference_mode():
            hidden = self.model(**self.inputs).last_hidden_state
            vectors = _pool(hidden, self.inputs["attention_mask"], self.params.pooling)
            return torch.nn.functional.normalize(vectors, dim=1) if self.params.normalize else vectors

    def result(self, outcome: Any) -> Embedding:
        return Embedding(
            vectors=outcome.float().tolist(),
            requests=[RequestTimeline(input_tokens=length, output_tokens=0) for length in self.lengths],
        )


def _pool(hidden: Any, mask: Any, pooling: str) -> Any:
    """Pool (batch, tokens, width) with a right-padded mask (batch, tokens) to (batch, width)."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = mask.sum(dim=1) - 1
        return hidden[last.new_tensor(range(len(last))), last]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _class_names(mapping: Any) -> set[str]:
    """Return the class names in a mapping of model types; some types have several."""
    return {
        name
        for value in mapping.values()
        for name in (value if isinstance(value, (list, tuple)) else (value,))
        if name is not None
    }
