# SPDX-License-Identifier: Apache-2.0
"""The backend transformers with random weights drawn on the device instead of read from files.

Seven billion parameters are 14 GB; drawing them takes a second, writing and reading them most of the time of
a validation. Everything else is the backend's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.backends.transformers.backend import TransformersBackend
from pytest_llenergy.record.record import BackendInfo

#: Hidden size, feed-forward size, layers, heads, key-value heads.
SIZES = {
    "tiny": (64, 128, 2, 4, 2),
    "0.1b": (768, 2048, 12, 12, 12),
    "1b": (2048, 8192, 16, 32, 8),
    "7b": (4096, 11008, 32, 32, 32),
}

#: Size of the vocabulary; the tokenizer uses the first few entries, one per byte.
VOCABULARY = 32000


def write_model(size: str, directory: Path) -> None:
    """Write a configuration and a tokenizer without weights."""
    shutil.copytree(
        pretrained_path(resolve_model("random:llama-tiny")),
        directory,
        ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json"),
    )
    make_config(size).save_pretrained(directory)


def make_config(size: str) -> Any:
    """Return the configuration of a Llama model of this size."""
    from transformers import LlamaConfig

    hidden, inner, layers, heads, kv_heads = SIZES[size]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


class RandomWeightsBackend(TransformersBackend):
    """Draws random weights on load; ``options`` of the record state this."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        with _drawing("cpu" if context.devices == ("cpu",) else "cuda:0"):
            info = super().load(model, options, context)
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        options = {**info.options, "weights": "drawn at random", "parameters": parameters}
        return BackendInfo(
            name=info.name,
            version=info.version,
            model=info.model,
            model_revision=info.model_revision,
            dtype=info.dtype,
            options=options,
        )


@contextmanager
def _drawing(device: str) -> Iterator[None]:
    """Replace reading of models by random weights during the block."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def draw(path: str, **keywords: Any) -> Any:
        dtype = getattr(torch, keywords.pop("dtype"))
        with_report = keywords.pop("output_loading_info", False)
        torch.manual_seed(0)
        with torch.device(device):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **keywords)
        return (model, {"missing_keys": [], "mismatched_keys": []}) if with_report else model

    with patch.object(AutoModelForCausalLM, "from_pretrained", draw):
        yield
