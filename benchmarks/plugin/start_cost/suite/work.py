# SPDX-License-Identifier: Apache-2.0
"""The work of every test: eight tokens of a tiny Llama, which the process builds once."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def model() -> Any:
    """Build a model with two layers of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def generate() -> int:
    """Generate, and return the number of tokens."""
    import torch

    prompt = torch.ones(1, 4, dtype=torch.long)
    made = model().generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    return int(made.shape[1]) - 4


if __name__ == "__main__":
    assert generate() == 8
