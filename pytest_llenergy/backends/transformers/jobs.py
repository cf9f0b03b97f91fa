# SPDX-License-Identifier: Apache-2.0
"""Jobs of transformers: static batches with a timestamp per step, assisted generation, embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.batches import batch_result
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import explain_load_error, resolve_model
from pytest_llenergy.backends.tasks import (
    Embedding,
    EmbeddingParams,
    Generation,
    GenerationParams,
    cut_at_end,
)
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.timeline import RequestTimeline

#: How an assistant drafts: transformers' defaults, set explicitly so that no model overrides them. Within a
#: sequence the threshold adapts if scikit-learn is installed.
DRAFTING: dict[str, Primitive] = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}

#: Longest suffix that is searched for in the prompt: transformers' default, set explicitly.
MAX_MATCHING_NGRAM_SIZE = 2


class StepClock:
    """A streamer that records when each decoding step produced its tokens.

    ``generate`` calls ``put`` once with the prompt and then after each step, when its tokens have been copied
    to the host, so the device has finished the step. A step gives each sequence one token, shape
    ``(batch,)``; with drafted tokens it gives the only sequence several, shape ``(1, tokens)``.
    """

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Record the time of a step, once per token that it gave a sequence."""
        if self._prompt_seen:
            count = tokens.shape[1] if tokens.dim() == 2 else 1
            self.steps_ns.extend([time.monotonic_ns()] * count)
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the last step was already recorded."""


def generation_config(params: GenerationParams, ends: frozenset[int], pad: int, **keywords: Any) -> Any:
    """Return a complete ``GenerationConfig``, which leaves nothing to the defaults of a model.

    Args:
        params: Parameters of the call.
        ends: Tokens that end a sequence.
        pad: Token that fills ended sequences.
        **keywords: Further fields of ``GenerationConfig``.
    """
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
        **keywords,
    )


@dataclass
class TransformersJob:
    """A padded batch on the device.

    Attributes:
        ends: Tokens that end a sequence.
        keywords: Further arguments of ``generate``.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]
    keywords: dict[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Any, StepClock]:
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        with torch.inference_mode():
            output = self.model.generate(
                **self.inputs, generation_config=self.config, streamer=clock, **self.keywords
            )
        return output, clock

    def result(self, outcome: tuple[Any, StepClock]) -> Generation:
        output, clock = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [cut_at_end(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return batch_result(texts, token_ids, mask.sum(dim=1).tolist(), clock.steps_ns)


def prompt_lookup_options(prompt_lookup_num_tokens: int | None) -> dict[str, Primitive]:
    """Return the options that draft from the prompt, for ``GenerationConfig`` and records; empty if not
    requested.
    """
    if prompt_lookup_num_tokens is None:
        return {}
    return {
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        "max_matching_ngram_size": MAX_MATCHING_NGRAM_SIZE,
    }


def load_assistant(name: str, model: Any) -> tuple[Any, dict[str, Primitive]]:
    """Load an assistant in the dtype and on the device of the model. Returns it and what goes into the
    record.

    Raises:
        ModelError: If it cannot be loaded.
        BackendError: If its vocabulary differs.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import is_sklearn_available

    try:
        source = resolve_model(name)
    except ModelError as error:
        raise ModelError(f"assistant: {error}") from None
    try:
        assistant: Any = AutoModelForCausalLM.from_pretrained(pretrained_path(source), dtype=model.dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"assistant: {explain_load_error(source, error)}") from error
    sizes = [each.config.get_text_config().vocab_size for each in (assistant, model)]
    if sizes[0] != sizes[1]:
        raise BackendError(
            f"transformers: assistant {source.label} has a vocabulary of {sizes[0]} tokens and the model one "
            f"of {sizes[1]}; name a model with the same tokenizer"
        )
    assistant.generation_config = GenerationConfig(**DRAFTING)
    recorded = {"assistant": source.label, **DRAFTING, "threshold_adapts": bool(is_sklearn_available())}
    return assistant.to(model.device).eval(), recorded


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
