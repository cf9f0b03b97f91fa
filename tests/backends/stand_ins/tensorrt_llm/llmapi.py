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
