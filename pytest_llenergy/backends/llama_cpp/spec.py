# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp offers."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.model import ModelSource, as_gguf


def refuses(model: ModelSource) -> str | None:
    """llama.cpp reads GGUF files."""
    return None if model.kind == "gguf" else f"llama-cpp reads .gguf files, not {model.label}{as_gguf(model)}"


SPEC = BackendSpec(
    name="llama-cpp",
    factory="pytest_llenergy.backends.llama_cpp.backend:LlamaCppBackend",
    requires=("xllamacpp",),
    install="pip install 'pytest-llenergy[llama-cpp]'",
    capabilities=Capabilities(
        data=True,
        prefix_cache="switched off",
        timestamps="step",
        clock="the engine's own durations of prompt and generation, laid back from the arrival of its answer",
        reasons={
            "tensor": "it splits a model over GPUs only, and its wheel is for the CPU",
            "pipeline": "it splits a model over GPUs only, and its wheel is for the CPU",
            "placement": "its wheel is for the CPU",
            "gpu": "its wheel is for the CPU",
            "batching": "one slot a prompt, all prompts in one prefill",
            "caches": "as large as the batch can need; attention covers the part in use",
            "exact": "late by the way of its answer through a local socket, a millisecond on a quiet machine",
            "stop_token_ids": "its server stops at texts, not at tokens",
        },
        sources={
            **dict.fromkeys(
                ("launch", "managed_by", "cpu", "tasks", "caches", "options", "hardware"), "tested"
            ),
            **dict.fromkeys(("gpu", "tensor", "pipeline", "placement"), "this adapter"),
            "data": "tested",
            "batching": "tested",
            "prefix_cache": "tested",
            "timestamps": "tools/server/README.md of llama.cpp, timings",
            "stop_token_ids": "tools/server/README.md of llama.cpp, POST /completion",
        },
        hardware="CPU",
    ),
    refuses=refuses,
)
