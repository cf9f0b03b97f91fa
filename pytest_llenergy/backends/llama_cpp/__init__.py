# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, through the server of xllamacpp inside the rank. Reads GGUF files; needs no torch."""

from __future__ import annotations

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource


def refuses(model: ModelSource) -> str | None:
    """Return why llama.cpp cannot read a model. It reads GGUF files."""
    return None if model.kind == "gguf" else f"llama-cpp reads .gguf files, not {model.label}"


SPEC = BackendSpec(
    name="llama-cpp",
    factory="pytest_llenergy.backends.llama_cpp.backend:LlamaCppBackend",
    requires=("xllamacpp", "gguf"),
    install="pip install 'pytest-llenergy[llama-cpp]'",
    capabilities=Capabilities(
        data=True,
        options=("dtype",),
        passes=True,
        timestamps="step",
    ),
    refuses=refuses,
)
