# SPDX-License-Identifier: Apache-2.0
"""Writes ``random:llama-tiny`` as GGUF: ``python -m tests.backends.tiny_gguf FILE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model


def write_gguf(directory: Path, file: Path) -> None:
    """Write what llama.cpp's ``convert_hf_to_gguf.py`` writes for a Llama with byte tokens."""
    import gguf
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(64)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[token not in ("<pad>", "<bos>", "<eos>")] for token in tokens])
    # An empty list cannot be written; no prompt here has these two in a row.
    writer.add_token_merges(["~ ~"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        of_rope = next((heads[part] for part in heads if part in name), None)
        data = weights if of_rope is None else interleaved(weights, of_rope)
        writer.add_tensor(names.get_name(name, (".weight",)), data.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weights: Any, heads: int) -> Any:
    """Reorder rows as llama.cpp rotates pairs of them."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    write_gguf(Path(pretrained_path(resolve_model("random:llama-tiny"))), Path(sys.argv[1]))
