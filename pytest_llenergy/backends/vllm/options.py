# SPDX-License-Identifier: Apache-2.0
"""Load options of vLLM: the common ones as it calls them, its own, and how it has resolved them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.options import (
    COMMON_OPTIONS,
    DEVICES,
    PROMPT_LOOKUP,
    SOURCE,
    Speculative,
    select_options,
)
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive

#: Key-value cache of each worker on a CPU. By default vLLM takes 92 % of memory, and does not start if less
#: is free (vllm/v1/worker/cpu_worker.py).
KV_CACHE_BYTES_ON_CPU = 1 << 30

#: The only attention implementation on a CPU: vLLM replaces any other one without an error.
CPU_ATTENTION = "CPU_ATTN"

#: Common options that are an argument of ``vllm.EngineArgs`` under this name.
SAME = {
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "attention": "attention_backend",
    "prefix_cache": "enable_prefix_caching",
}

#: Fields of ``vllm.EngineArgs`` that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "skip_tokenizer_init", "hf_config_path"), SOURCE),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), SOURCE),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "device_ids", "nnodes"), DEVICES),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "numa_bind_cpus"), DEVICES),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_backend"), DEVICES),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"), "its values are arguments of generate"
    ),
    **dict.fromkeys(("runner", "convert", "tokens_only"), "this backend generates text"),
    "seed": "a seed is an argument of generate",
    "disable_log_stats": "statistics are off, because they cost time in every step",
    "stream_interval": "each token needs the timestamp of its step",
    "enable_prefix_caching": "use the load option prefix_cache",
    "per_request_spec_decode_metrics": "it is on with speculative",
}


def engine_keywords(options: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Return the keywords of ``vllm.LLM`` for load options."""
    if options.get("distributed_executor_backend") == "ray":
        raise BackendError(
            "vllm: distributed_executor_backend='ray' starts workers that Ray places and that outlive the "
            "test; leave it out, also for several hosts"
        )
    if on_cpu and options.get("attention") not in (None, CPU_ATTENTION):
        raise BackendError(
            f"vllm: attention={options['attention']!r} does not run on a CPU; leave it out, or give "
            f"{CPU_ATTENTION!r}"
        )
    passed = select_options("vllm", options, COMMON_OPTIONS, RESERVED)
    keywords = dict(**_translate(options), **passed)
    if on_cpu and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(passed):
        keywords["kv_cache_memory_bytes"] = KV_CACHE_BYTES_ON_CPU
    if {"speculative_config", "spec_method", "spec_model"} & set(keywords):
        keywords["per_request_spec_decode_metrics"] = "summary"
    return {"enable_prefix_caching": False, **keywords}


def _translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs`` that the common options set."""
    found = {SAME[name]: options[name] for name in SAME if options.get(name) is not None}
    if (chunk := options.get("chunked_prefill")) is not None:
        found["enable_chunked_prefill"] = bool(chunk)
        if not isinstance(chunk, bool):
            found["max_num_batched_tokens"] = chunk
    draft = Speculative.parse("vllm", options)
    if draft is not None:
        found["speculative_config"] = _speculative_config(draft)
    if options.get("lora") is not None:
        found |= {"enable_lora": True, "max_loras": 1}
    mode = options.get("compile")
    if isinstance(mode, bool):
        found["enforce_eager"] = not mode
    elif mode is not None:
        found["compilation_config"] = {"mode": mode.upper()}
    return found


def _speculative_config(draft: Speculative) -> dict[str, Any]:
    """Return the ``SpeculativeConfig`` of vLLM, which calls prompt lookup ``ngram``."""
    config: dict[str, Any] = {"num_speculative_tokens": draft.num_tokens}
    if draft.method == PROMPT_LOOKUP:
        return {**config, "method": "ngram", "prompt_lookup_max": draft.max_ngram, "prompt_lookup_min": 1}
    if draft.model is not None:
        config["model"] = pretrained_path(resolve_model(draft.model))
    return {**config, "method": draft.method}


def effective_settings(config: Any) -> dict[str, Primitive]:
    """Return the settings that decide how vLLM runs, as it resolved them."""
    cache, scheduler, drafting = config.cache_config, config.scheduler_config, config.speculative_config
    # Early releases have one node only, and no such field.
    nodes = int(getattr(config.parallel_config, "nnodes", 1))
    settings: dict[str, Primitive] = {
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
    }
    if drafting is not None:
        settings["draft_method"] = str(drafting.method)
        settings["num_speculative_tokens"] = int(drafting.num_speculative_tokens)
    return settings
