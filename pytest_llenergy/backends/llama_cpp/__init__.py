# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp inside the rank. Reads GGUF files; needs no torch."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.engine_options import NO_PREFIX_CACHE
from pytest_llenergy.backends.models import ModelSource, gguf_hint


def refuses(model: ModelSource) -> str | None:
    """Return why llama.cpp cannot read a model. It reads GGUF files."""
    return (
        None if model.kind == "gguf" else f"llama-cpp reads .gguf files, not {model.label}{gguf_hint(model)}"
    )


SPEC = BackendSpec(
    name="llama-cpp",
    factory="pytest_llenergy.backends.llama_cpp.backend:LlamaCppBackend",
    requires=("xllamacpp",),
    install="pip install 'pytest-llenergy[llama-cpp]'",
    capabilities=Capabilities(
        data=True,
        options=("dtype", "kv_cache_dtype", "attention", "chunked_prefill", "lora"),
        off=("prefix_cache", "compile"),
        passes="fields of xllamacpp.CommonParams with which its server loads and computes",
        prefix_cache="switched off",
        timestamps="step",
        clock="llama.cpp's durations of prompt and generation, counted back from the arrival of its answer",
        reasons={
            "tensor": "it splits a model over GPUs only, and its wheel is for the CPU",
            "pipeline": "it splits a model over GPUs only, and its wheel is for the CPU",
            "placement": "its wheel is for the CPU",
            "gpu": "its wheel is for the CPU",
            "batching": "one slot per prompt, all prompts in one prefill",
            "caches": "sized for the batch; attention covers the part in use",
            "exact": "late by the latency of a local socket, a millisecond on a quiet machine",
            "stop_token_ids": "its server stops at texts, not at tokens",
            "options_prefix_cache": NO_PREFIX_CACHE,
            "options_quantization": "it reads the weights as the file stores them; name another file",
            "options_speculative": "not offered by this adapter, whose steps have one token of each prompt",
            "options_compile": "its kernels are compiled already",
        },
        sources={
            "hosts": "this adapter",
            **dict.fromkeys(
                ("launch", "managed_by", "cpu", "tasks", "caches", "options", "hardware"), "tested"
            ),
            **dict.fromkeys(("gpu", "tensor", "pipeline", "placement"), "this adapter"),
            "data": "tested",
            "batching": "tested",
            "prefix_cache": "tested",
            **dict.fromkeys(("passes", "options_prefix_cache", "options_quantization"), "tested"),
            **dict.fromkeys(("sampling", "options_speculative"), "this adapter"),
            "options_compile": "https://github.com/ggml-org/llama.cpp/blob/master/docs/build.md",
            "timestamps": "tools/server/README.md of llama.cpp, timings",
            "stop_token_ids": "tools/server/README.md of llama.cpp, POST /completion",
        },
        hardware="CPU",
    ),
    refuses=refuses,
)
