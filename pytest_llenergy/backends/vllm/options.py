# SPDX-License-Identifier: Apache-2.0
"""Load options of vLLM: the common ones as it calls them, its own, and how it has resolved them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.engine_options import (
    COMMON_OPTIONS,
    DEVICES,
    PROMPT_LOOKUP,
    SOURCE,
    CommonOptions,
    Speculative,
    combine_options,
    refuse_options,
)
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive

#: Key-value cache of each worker on a CPU. By default vLLM takes 92 % of memory, and does not start if less
#: is free (vllm/v1/worker/cpu_worker.py).
KV_CACHE_BYTES_ON_CPU = 1 << 30

#: The only attention implementation on a CPU: vLLM replaces any other one without an error.
CPU_ATTENTION = "CPU_ATTN"

#: Ranks of adapters that vLLM reserves space for (``MaxLoRARanks`` of vllm/config/lora.py).
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

ARGUMENT = "its values are arguments of generate"

#: Fields of ``vllm.EngineArgs`` that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "skip_tokenizer_init", "hf_config_path"), SOURCE),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), SOURCE),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "device_ids", "nnodes"), DEVICES),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "numa_bind_cpus"), DEVICES),
    **dict.fromkeys(("generation_config", "override_generation_config"), ARGUMENT),
    **dict.fromkeys(("runner", "convert", "tokens_only"), "this backend generates text"),
    "seed": "a seed is an argument of generate",
    "disable_log_stats": "statistics are off, because they cost time in every step",
    "stream_interval": "each token needs the timestamp of its step",
    "enable_prefix_caching": "use the load option prefix_cache",
    "per_request_spec_decode_metrics": "it is on with speculative",
}


def parse_options(options: Mapping[str, Any], *, on_cpu: bool) -> tuple[CommonOptions, dict[str, Any]]:
    """Check the common options. Returns them, and the options that are passed on.

    Raises:
        BackendError: If a value is invalid, or not possible on a CPU.
    """
    common = CommonOptions.parse("vllm", options)
    if options.get("distributed_executor_backend") == "ray":
        raise BackendError(
            "vllm: distributed_executor_backend='ray' starts workers that Ray places and that outlive the "
            "test; leave it out, also for several hosts"
        )
    if on_cpu and common.attention not in (None, CPU_ATTENTION):
        raise BackendError(
            f"vllm: attention={common.attention!r} does not run on a CPU; leave it out, or give "
            f"{CPU_ATTENTION!r}"
        )
    return common, {name: value for name, value in options.items() if name not in COMMON_OPTIONS}


def engine_keywords(common: CommonOptions, passed: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return the keywords of ``vllm.LLM`` for load options.

    Raises:
        BackendError: If this backend sets one of them.
    """
    for name in passed:
        if name.startswith("data_parallel_"):
            raise BackendError(f"vllm: the load option {name} is not available: {DEVICES}")
    refuse_options("vllm", passed, RESERVED)
    keywords = combine_options("vllm", _translate(common), passed)
    if on_cpu and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(passed):
        keywords["kv_cache_memory_bytes"] = KV_CACHE_BYTES_ON_CPU
    if {"speculative_config", "spec_method", "spec_model"} & set(keywords):
        keywords["per_request_spec_decode_metrics"] = "summary"
    return {"enable_prefix_caching": False, **keywords}


def _translate(common: CommonOptions) -> dict[str, dict[str, Any]]:
    """Return what each common option sets in ``vllm.EngineArgs``."""
    names = {
        "dtype": "dtype",
        "quantization": "quantization",
        "kv_cache_dtype": "kv_cache_dtype",
        "attention": "attention_backend",
        "prefix_cache": "enable_prefix_caching",
    }
    values = {name: getattr(common, name) for name in names}
    found = {name: {names[name]: value} for name, value in values.items() if value is not None}
    if common.chunked_prefill is not None:
        found["chunked_prefill"] = {"enable_chunked_prefill": bool(common.chunked_prefill)}
        if not isinstance(common.chunked_prefill, bool):
            found["chunked_prefill"]["max_num_batched_tokens"] = common.chunked_prefill
    if common.speculative is not None:
        found["speculative"] = {"speculative_config": _speculative_config(common.speculative)}
    if common.lora is not None:
        rank = next((each for each in LORA_RANKS if each >= common.lora_rank), LORA_RANKS[-1])
        found["lora"] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if isinstance(common.compile, bool):
        found["compile"] = {"enforce_eager": not common.compile}
    elif common.compile is not None:
        found["compile"] = {"compilation_config": {"mode": common.compile.upper()}}
    return found


def _speculative_config(draft: Speculative) -> dict[str, Any]:
    """Return the ``SpeculativeConfig`` of vLLM, which calls prompt lookup ``ngram``."""
    config: dict[str, Any] = {"num_speculative_tokens": draft.num_tokens}
    if draft.kind == PROMPT_LOOKUP:
        return {**config, "method": "ngram", "prompt_lookup_max": draft.max_ngram, "prompt_lookup_min": 1}
    if draft.model is not None:
        config["model"] = pretrained_path(resolve_model(draft.model))
    return {**config, "method": draft.kind}


def effective_settings(config: Any) -> dict[str, Primitive]:
    """Return the settings that decide how vLLM runs, as it resolved them."""
    cache, scheduler = config.cache_config, config.scheduler_config
    # Early releases have one node only, and no such field.
    nodes = int(getattr(config.parallel_config, "nnodes", 1))
    return {
        "prefix_caching": bool(cache.enable_prefix_caching),
        "engine_core": "in the rank",
        "executor": str(config.parallel_config.distributed_executor_backend),
        **({"nodes": nodes} if nodes > 1 else {}),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "compilation_mode": str(getattr(config.compilation_config.mode, "name", None)),
        "max_model_len": int(config.model_config.max_model_len),
        "quantization": config.model_config.quantization,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": bool(scheduler.async_scheduling),
        **_drafting(config.speculative_config),
    }


def _drafting(config: Any) -> dict[str, Primitive]:
    """Return how vLLM drafts tokens; empty if it does not."""
    if config is None:
        return {}
    return {"draft_method": str(config.method), "num_speculative_tokens": int(config.num_speculative_tokens)}
