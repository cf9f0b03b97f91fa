# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of the tiny model, as peft saves it."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model

from .loaded_ranks import TINY

RANK = 4


def save_adapter(directory: Path) -> None:
    """Save a LoRA adapter of the tiny model, with weights that matter."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(pretrained_path(resolve_model(TINY)))
    width, kept = config.hidden_size, config.num_attention_heads * config.head_dim
    weights = {}
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, width)
        weights[f"{name}.lora_B.weight"] = torch.randn(kept, RANK)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    settings |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
