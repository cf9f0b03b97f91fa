# SPDX-License-Identifier: Apache-2.0
"""``ServerArgs``, as python/sglang/srt/server_args.py has it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class ServerArgs:
    """Those of its many arguments that a caller here could mean."""

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    context_length: int | None = None
    mem_fraction_static: float | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    dist_init_addr: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    random_seed: int | None = None
    log_level: str = "info"
    attention_backend: str | None = None
    sampling_backend: str | None = None
    kv_cache_dtype: str = "auto"
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    lora_paths: dict[str, str] | None = None
    enable_torch_compile: bool = False
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    enable_deterministic_inference: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "half", "float16", "bfloat16", "float", "float32"):
            raise ValueError(f"unknown dtype {self.dtype}")
        assert self.nnodes == 1 or (self.dist_init_addr and self.dp_size == 1)
