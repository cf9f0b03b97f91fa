# SPDX-License-Identifier: Apache-2.0
"""What TensorRT-LLM offers, as its documentation and source say."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.model import no_openvino_ir

REFERENCE = "https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html"

SPEC = BackendSpec(
    name="tensorrt-llm",
    factory="pytest_llenergy.backends.tensorrt_llm.backend:TensorRtLlmBackend",
    requires=("tensorrt_llm", "transformers"),
    install="install it as https://nvidia.github.io/TensorRT-LLM/installation/ says, in an environment of "
    "its own, and name its Python: --energy-python=tensorrt-llm=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="engine",
        replicas="plugin",
        data=True,
        tensor=True,
        pipeline=True,
        cpu=False,
        gpu=True,
        options=("dtype", "max_seq_len", "max_num_tokens", "max_batch_size", "free_gpu_memory_fraction"),
        batching=("continuous",),
        prefix_cache="switched off",
        timestamps="token",
        exact=True,
        clock="the engine's steady clock, of the first and the last token of a request",
        reasons={
            "cpu": "TensorRT-LLM runs on NVIDIA GPUs only",
            "placement": "TensorRT-LLM shards a model; it does not put its layers on devices that take turns",
        },
        sources={
            **dict.fromkeys(("data", "cpu", "placement", "tasks", "caches"), "this adapter"),
            "managed_by": REFERENCE,
            "gpu": REFERENCE,
            "launch": "tensorrt_llm/llmapi/llm.py (MpiPoolSession)",
            "replicas": "the plugin starts one LLM for each",
            "tensor": f"{REFERENCE} (LLM, tensor_parallel_size)",
            "pipeline": f"{REFERENCE} (LLM, pipeline_parallel_size)",
            "options": f"{REFERENCE} (TorchLlmArgs, KvCacheConfig)",
            "batching": REFERENCE,
            "prefix_cache": f"{REFERENCE} (KvCacheConfig, enable_block_reuse)",
            "timestamps": f"{REFERENCE} (SamplingParams, return_perf_metrics)",
            "clock": "tensorrt_llm/llmapi/llm.py (steady_clock_now)",
        },
        hardware=None,
    ),
    refuses=lambda model: no_openvino_ir("tensorrt-llm", model),
)
