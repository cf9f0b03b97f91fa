# SPDX-License-Identifier: Apache-2.0
"""Directories that transformers can load, made of what it cannot load fast or at all.

Reading a GGUF file through transformers dequantises it anew each time (tens of seconds); the same
weights as bf16 safetensors load in about one. Runs in a rank, never in the pytest process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_llenergy.backends.cache import cached, file_digest
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import ModelError

#: Part of the cache key: raise it when the same input gives another directory.
FORMAT = 1


def local_directory(source: ModelSource) -> str:
    """A path or hub id that ``from_pretrained`` takes; converts or builds on first use.

    Raises ``ModelError`` when that fails.
    """
    if source.directory:
        return source.directory
    if source.kind == "gguf":
        file = Path(source.location)
        key = f"{file.stem}-bf16-{file_digest(file)[:16]}-v{FORMAT}"
        return str(cached(key, lambda directory: _convert_gguf(file, directory)))
    if source.kind == "random":
        key = f"random-{source.location}-v{FORMAT}"
        return str(cached(key, lambda directory: _build_random(source.location, directory)))
    return source.location


def _convert_gguf(file: Path, directory: Path) -> None:
    try:
        import gguf as _gguf  # noqa: F401 - transformers imports it late and says less
    except ImportError:
        raise ModelError(f"{file.name}: reading GGUF needs the module gguf; pip install gguf") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        # A damaged file makes its reader fail anywhere, with anything.
        raise ModelError(f"{file.name}: transformers cannot read this GGUF file ({error})") from error
    # The weights are plain floats by now, but transformers refuses to save what was loaded quantised.
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _build_random(preset: str, directory: Path) -> None:
    import torch

    tokenizer = _byte_tokenizer()
    torch.manual_seed(0)
    model = _random_bert(len(tokenizer)) if preset == "bert-tiny" else _random_llama(preset, len(tokenizer))
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _byte_tokenizer() -> Any:
    """One token a byte, and none besides."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _random_llama(preset: str, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # Heads of 64 and even head counts, so that every engine's kernels and tensor parallelism of 2 fit.
    shape = {
        "llama-tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2},
        "llama-135m": {"hidden_size": 640, "intermediate_size": 1536, "num_hidden_layers": 30},
    }[preset]
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
    # The usual small initialisation makes all tokens nearly alike; these weights tell them apart.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def _random_bert(vocabulary: int) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
        )
    )
