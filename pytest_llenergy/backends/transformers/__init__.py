# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: one process per device, static or continuous batches, embeddings."""

from __future__ import annotations

from pathlib import Path

from pytest_llenergy.backends.base import BackendSpec, Capabilities

SPEC = BackendSpec(
    name="transformers",
    factory="pytest_llenergy.backends.transformers.backend:TransformersBackend",
    requires=("torch", "transformers"),
    install="pip install 'pytest-llenergy[transformers]'",
    capabilities=Capabilities(
        framework="torch",
        preload=("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
        data=True,
        tensor=True,
        placement=True,
        gpu=True,
        tasks=("generate", "embed"),
        options=(
            *("dtype", "quantization", "attention", "chunked_prefill", "speculative", "prefix_cache"),
            *("lora", "compile", "batching", "num_blocks", "max_batch_tokens"),
        ),
        passes="from_pretrained, GenerationConfig and the configuration of the model",
        sampling=("num_beams", "repetition_penalty", "min_p"),
        caches=("dynamic", "static"),
        batching=("static", "continuous"),
        timestamps="step",
        exact=True,
        clock="a streamer, per step, once the device has finished it; with continuous batching "
        "transformers' own, per token",
        changed_by={"batching": {"continuous": {"timestamps": "token", "sampling": ()}}},
        reasons={
            "options_kv_cache_dtype": "its quantised cache keeps up to 128 recent tokens unquantised",
            "sampling": "not with batching='continuous'",
            "pipeline": "its pp_size is not used here; layers on several GPUs are parallel(placement=n)",
            "placement": "device_map: whole layers on several GPUs, which work in turn",
        },
        sources={
            "hosts": "ranks/plan.py: ranks of all hosts join one process group",
            **dict.fromkeys(("launch", "managed_by", "cpu", "hardware"), "tested"),
            **dict.fromkeys(("gpu", "pipeline"), "this adapter"),
            **dict.fromkeys(("tasks", "caches", "batching", "timestamps", "exact", "clock"), "tested"),
            **dict.fromkeys(("data", "tensor", "options", "passes", "sampling", "prefix_cache"), "tested"),
            "options_kv_cache_dtype": "transformers.QuantizedCache (residual_length)",
            # Refusals and the record are tested; generating on several GPUs is not.
            "placement": "https://huggingface.co/docs/accelerate/usage_guides/big_modeling",
        },
        hardware="CPU",
    ),
    refuses=lambda model: (
        "transformers reads directories with config.json, not OpenVINO IR or ONNX"
        if model.kind == "directory" and not (Path(model.location) / "config.json").exists()
        else None
    ),
)
