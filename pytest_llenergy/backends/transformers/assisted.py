# SPDX-License-Identifier: Apache-2.0
"""Assisted generation: something cheap drafts tokens, the model checks several of them in one step."""

from __future__ import annotations

from typing import Any

from pytest_llenergy.backends.convert import local_directory
from pytest_llenergy.backends.hub import explain
from pytest_llenergy.backends.model import resolve
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import Primitive

#: How an assistant drafts: transformers' own defaults, set so that no model's own replace them. Within a
#: sequence the threshold adapts itself where scikit-learn is installed.
DRAFTING: dict[str, Primitive] = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}

#: The longest stretch of the last tokens that is looked for in the prompt, likewise.
MAX_MATCHING_NGRAM_SIZE = 2


def lookup(prompt_lookup_num_tokens: int | None) -> dict[str, Primitive]:
    """Drafting from the prompt, for ``GenerationConfig`` and records; nothing where it is not asked for."""
    if prompt_lookup_num_tokens is None:
        return {}
    return {
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        "max_matching_ngram_size": MAX_MATCHING_NGRAM_SIZE,
    }


def load(name: str, model: Any) -> tuple[Any, dict[str, Primitive]]:
    """The assistant, in the dtype and on the device of the model, and what goes into records.

    Raises ``ModelError`` when it cannot be loaded, ``BackendError`` when it has another vocabulary.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import is_sklearn_available

    try:
        source = resolve(name)
    except ModelError as error:
        raise ModelError(f"assistant: {error}") from None
    try:
        assistant: Any = AutoModelForCausalLM.from_pretrained(local_directory(source), dtype=model.dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"assistant: {explain(source, error)}") from error
    sizes = [each.config.get_text_config().vocab_size for each in (assistant, model)]
    if sizes[0] != sizes[1]:
        raise BackendError(
            f"transformers: assistant {source.label} has a vocabulary of {sizes[0]} tokens and the model one "
            f"of {sizes[1]}; name a model with the same tokenizer"
        )
    assistant.generation_config = GenerationConfig(**DRAFTING)
    told = {"assistant": source.label, **DRAFTING, "threshold_adapts": bool(is_sklearn_available())}
    return assistant.to(model.device).eval(), told
