# SPDX-License-Identifier: Apache-2.0
"""What SGLang offers, as its documentation and source say."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.model import no_openvino_ir

ENGINE = "https://docs.sglang.io/basic_usage/offline_engine_api.html"
ARGUMENTS = "https://docs.sglang.io/advanced_features/server_arguments.html"

SPEC = BackendSpec(
    name="sglang",
    factory="pytest_llenergy.backends.sglang.backend:SglangBackend",
    requires=("sglang", "transformers"),
    install="pip install sglang into an environment of its own, and name its Python: "
    "--energy-python=sglang=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="engine",
        replicas="engine",
        data=True,
        tensor=True,
        pipeline=True,
        cpu=False,
        gpu=True,
        options=(
            *("dtype", "quantization", "context_length", "mem_fraction_static", "attention_backend"),
            *("disable_cuda_graph", "enable_deterministic_inference"),
        ),
        batching=("continuous",),
        prefix_cache="switched off",
        reasons={
            "cpu": "the wheel on PyPI is for CUDA",
            "placement": "SGLang shards a model; it does not put its layers on devices that take turns",
            "timestamps": "generate() tells how long a request took and not when its tokens came",
        },
        sources={
            **dict.fromkeys(("cpu", "placement", "tasks", "caches"), "this adapter"),
            "managed_by": ENGINE,
            "gpu": ENGINE,
            "launch": ENGINE,
            "replicas": f"{ARGUMENTS} (dp_size)",
            "data": f"{ARGUMENTS} (dp_size)",
            "tensor": f"{ARGUMENTS} (tp_size)",
            "pipeline": f"{ARGUMENTS} (pp_size)",
            "options": ARGUMENTS,
            "batching": ENGINE,
            "prefix_cache": f"{ARGUMENTS} (disable_radix_cache); cached_tokens in meta_info",
            "timestamps": "python/sglang/srt/managers/tokenizer_manager.py (meta_info)",
        },
        hardware=None,
    ),
    refuses=lambda model: no_openvino_ir("sglang", model),
)
