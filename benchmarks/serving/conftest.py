# SPDX-License-Identifier: Apache-2.0
"""Register llama.cpp's server if the package xllamacpp is installed."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import BackendSpec

PROGRAM = Path(__file__).parent / "llama_server.py"

LLAMA_SERVER = replace(
    server.SPEC,
    name="llama-server",
    requires=(*server.SPEC.requires, "xllamacpp"),
    install="pip install 'pytest-llenergy[server,llama-cpp]'",
    refuses=lambda model: (
        None if model.kind == "gguf" else f"llama-server reads .gguf files, not {model.label}"
    ),
    preset={"command": f"{shlex.join([sys.executable, str(PROGRAM)])} {{model}} {{port}} {{threads}}"},
    needs=None,
)


def pytest_llenergy_backends() -> list[BackendSpec]:
    """Register the server as an additional backend for the tests in this folder."""
    return [LLAMA_SERVER]
