# SPDX-License-Identifier: Apache-2.0
"""Models with random weights, and a tokenizer of bytes: for tests that need no download."""

from __future__ import annotations

from typing import Any

#: Heads of 64 and even head counts fit every backend's kernels and tensor parallelism of 2.
LLAMA_SHAPES = {
    "llama-tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2},
    "llama-135m": {"hidden_size": 640, "intermediate_size": 1536, "num_hidden_layers": 30},
}

RANDOM_PRESETS = tuple(LLAMA_SHAPES)


def make_random_model(preset: str) -> tuple[Any, Any]:
    """Return the model of a preset, and its tokenizer."""
    import torch

    tokenizer = _byte_tokenizer()
    torch.manual_seed(0)
    return _random_llama(preset, len(tokenizer)), tokenizer


def _byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte and no others but the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _random_llama(preset: str, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LLAMA_SHAPES[preset]
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **shape,
    )
    model: Any = LlamaForCausalLM(config)
    # The usual small initialisation makes all tokens nearly equally likely; these weights separate them.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model
