# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime GenAI offers."""

from __future__ import annotations

from pathlib import Path

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.convert_onnx import cannot_convert, is_converted
from pytest_llenergy.backends.model import ModelSource


def refuses(model: ModelSource) -> str | None:
    """It reads its own directories, and what its builder can convert."""
    if is_converted(model):
        return None
    if model.kind != "directory" or (Path(model.location) / "config.json").exists():
        return cannot_convert(model)
    return f"onnxruntime reads directories with genai_config.json or config.json, not {model.label}"


SPEC = BackendSpec(
    name="onnxruntime",
    factory="pytest_llenergy.backends.onnxruntime.backend:OnnxRuntimeBackend",
    requires=("onnxruntime_genai",),
    install="pip install 'pytest-llenergy[onnxruntime]'",
    capabilities=Capabilities(
        data=True,
        options=("precision",),
        caches=("dynamic", "static"),
        prefix_cache="none: every run has a generator of its own",
        timestamps="step",
        exact=True,
        clock="ours, after each step, when its tokens are on the host",
        reasons={
            "tensor": "a generator runs in one session",
            "pipeline": "a generator runs in one session",
            "placement": "only its CPU provider is used here",
            "gpu": "only its CPU provider is used here",
            "batching": "right-padded, since its fused attention counts positions from the start of a row",
        },
        sources={
            **dict.fromkeys(("launch", "managed_by", "cpu", "tasks", "hardware"), "tested"),
            **dict.fromkeys(("gpu", "tensor", "pipeline", "placement"), "this adapter"),
            "data": "tested",
            "caches": "tested",
            "batching": "tested",
            "prefix_cache": "tested",
            "timestamps": "tested",
            "options": "onnxruntime_genai/models/builder.py, --precision with the provider cpu",
        },
        hardware="CPU",
    ),
    refuses=refuses,
)
