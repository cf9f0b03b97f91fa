# SPDX-License-Identifier: Apache-2.0
"""``tensorrt_llm.llmapi``, as far as it is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    dtype: str = "auto"


@dataclass(kw_only=True)
class NGramDecodingConfig:
    max_draft_len: int
    max_matching_ngram_size: int = 2


@dataclass(kw_only=True)
class DraftTargetDecodingConfig:
    max_draft_len: int
    speculative_model: str | None = None


@dataclass(kw_only=True)
class TorchCompileConfig:
    enable_fullgraph: bool = True


class TorchLlmArgs:
    """A pydantic model there; those of its many fields that a caller here could mean."""

    model_fields = dict.fromkeys(
        (
            *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "dtype"),
            *("tensor_parallel_size", "pipeline_parallel_size", "revision", "tokenizer_revision"),
            *("kv_cache_config", "max_seq_len", "max_num_tokens", "max_batch_size", "max_beam_width"),
            *("max_input_len", "scheduler_config"),
            *("backend", "disable_overlap_scheduler", "cuda_graph_config", "attn_backend"),
            *("enable_chunked_prefill", "speculative_config", "torch_compile_config", "lora_config"),
        )
    )
