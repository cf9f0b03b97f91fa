# SPDX-License-Identifier: Apache-2.0
"""Embeddings of transformers: padded batches, each text pooled without its padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.batches import encode_prompts
from pytest_llenergy.backends.tasks import Embedding, EmbeddingParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.timeline import RequestTimeline


def is_encoder(config: Any) -> bool:
    """Whether a model was saved without a head that predicts the next token.

    ``AutoModelForCausalLM`` would load such a model too, with a randomly initialised head.
    """
    from transformers.models.auto import modeling_auto as auto

    def classes(*mappings: Any) -> set[str]:
        found = (value for mapping in mappings for value in mapping.values())
        return {name for each in found for name in ([each] if isinstance(each, str) else each or ())}

    saved = set(config.architectures or ())
    encoding = classes(auto.MODEL_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    generating = classes(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return not config.is_encoder_decoder and bool(saved & encoding) and not saved & generating


def prepare_embedding(
    model: Any, tokenizer: Any, texts: Sequence[str], params: EmbeddingParams, device: str
) -> EmbeddingJob:
    """Prepare a padded batch."""
    rows = encode_prompts("transformers", lambda text: list(tokenizer(text)["input_ids"]), texts)
    lengths = [len(row) for row in rows]
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
    fits = min(limit for limit in limits if limit is not None)
    if max(lengths) > fits:
        raise BackendError(f"transformers: a text has {max(lengths)} tokens and the model takes {fits}")
    # With padding on the right, tokens keep the positions that they have alone.
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="right").to(device)
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
