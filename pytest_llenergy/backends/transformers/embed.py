# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts: from models that only encode, and from the body of those that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.embedding import Embedding, EmbeddingParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.timeline import RequestTimeline


def only_encodes(config: Any) -> bool:
    """Whether a model was saved without a head that predicts the next token.

    ``AutoModelForCausalLM`` would load such a model as well, with a head of random numbers.
    """
    from transformers.models.auto import modeling_auto as auto

    saved = set(config.architectures or ())
    generating = _classes(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    encoding = _classes(auto.MODEL_MAPPING_NAMES) | _classes(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return not config.is_encoder_decoder and bool(saved & encoding) and not saved & generating


def prepare_embedding(
    model: Any, tokenizer: Any, texts: Sequence[str], params: EmbeddingParams, device: str
) -> EmbeddingJob:
    """A padded batch. Raises ``BackendError`` for a text without tokens, or with more than fit."""
    # What is padded on the right has its tokens at the places that they have alone.
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right").to(device)
    lengths = [int(length) for length in inputs["attention_mask"].sum(dim=1)]
    if min(lengths) == 0:
        raise BackendError("transformers: a text has no tokens; leave empty texts out")
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
    fits = min(limit for limit in limits if limit is not None)
    if max(lengths) > fits:
        raise BackendError(
            f"transformers: a text has {max(lengths)} tokens and the model takes {fits}; shorten the text, "
            "nothing is cut off here"
        )
    # Of a model that generates this is all but the head.
    return EmbeddingJob(model.base_model, dict(inputs), lengths, params)


@dataclass
class EmbeddingJob:
    """A padded batch on the device; ``lengths`` are the texts' token counts without padding."""

    model: Any
    inputs: dict[str, Any]
    lengths: list[int]
    params: EmbeddingParams

    def run(self) -> Any:
        import torch

        with torch.inference_mode():
            hidden = self.model(**self.inputs).last_hidden_state
            vectors = _pooled(hidden, self.inputs["attention_mask"], self.params.pooling)
            return torch.nn.functional.normalize(vectors, dim=1) if self.params.normalize else vectors

    def result(self, outcome: Any) -> Embedding:
        return Embedding(
            vectors=outcome.float().tolist(),
            requests=[RequestTimeline(input_tokens=length, output_tokens=0) for length in self.lengths],
        )


def _pooled(hidden: Any, mask: Any, pooling: str) -> Any:
    """From (batch, tokens, width) and a right-padded mask (batch, tokens) to (batch, width)."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = mask.sum(dim=1) - 1
        return hidden[last.new_tensor(range(len(last))), last]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _classes(mapping: Any) -> set[str]:
    """The names of classes by kind of model; some kinds have several."""
    return {
        name
        for value in mapping.values()
        for name in (value if isinstance(value, (list, tuple)) else (value,))
        if name is not None
    }
