# SPDX-License-Identifier: Apache-2.0
"""Directories that ONNX Runtime GenAI can load, made once of a model in another format.

Its own model builder does that, in a process of its own: it imports torch, which the engine does not need.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_llenergy.backends.cache import cached, file_digest
from pytest_llenergy.backends.convert import local_directory
from pytest_llenergy.backends.hub import explain
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import ModelError

#: Part of the cache key: raise it when the same input gives another directory.
FORMAT = 1

#: What makes a directory one that the engine reads.
CONFIG = "genai_config.json"

#: Without it ONNX Runtime starts a thread that reports to its makers, while energy is measured.
QUIET = {"ORT_DISABLE_TELEMETRY": "1"}

BUILDER = "onnxruntime_genai.models.builder"
NEEDED = ("torch", "transformers", "onnx_ir")


def is_converted(source: ModelSource) -> bool:
    """Whether the engine reads it as it is."""
    return source.kind == "directory" and (Path(source.location) / CONFIG).exists()


def cannot_convert(source: ModelSource) -> str | None:
    """Which modules that the builder needs are not here, with the command that mends it."""
    absent = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    return (
        f"onnxruntime needs the module {', '.join(absent)} to convert {source.label}; pip install "
        f"'pytest-llenergy[onnxruntime,transformers]', or name a directory that holds {CONFIG}"
    )


def downloaded(source: ModelSource) -> ModelSource:
    """A hub model as the directory that it is downloaded to, whose name is its commit; others as they are.

    Raises ``ModelError`` when the hub does not give it.
    """
    if source.kind != "hub":
        return source
    try:
        from huggingface_hub import snapshot_download

        return ModelSource("directory", snapshot_download(source.location))
    except Exception as error:
        # Its errors come from several libraries.
        raise ModelError(explain(source, error)) from error


def onnx_directory(source: ModelSource, precision: str, version: str) -> Path:
    """The model as ONNX of that ``precision`` (``fp32``, ``int8``, ``int4``), converted on first use.

    ``version`` is that of the builder. Raises ``ModelError`` when a module is missing or the builder fails.
    """
    key = f"{_key(source)}-onnx-{precision}-{version}-v{FORMAT}"
    return cached(key, lambda directory: _convert(source, precision, directory))


def _key(source: ModelSource) -> str:
    if source.kind == "random":
        return f"random-{source.location}"
    path = Path(source.location)
    if source.kind == "gguf":
        return f"{path.stem}-{file_digest(path)[:16]}"
    # Reading all weights would take longer than loading them.
    files = sorted((file.name, file.stat()) for file in path.iterdir() if file.is_file())
    told = repr([(name, state.st_size, state.st_mtime_ns) for name, state in files])
    digest = hashlib.blake2b(f"{path} {told}".encode(), digest_size=8).hexdigest()
    return f"{path.name}-{digest}"


def _convert(source: ModelSource, precision: str, directory: Path) -> None:
    given = local_directory(source)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".builder-") as scratch:
        command = [sys.executable, "-m", BUILDER, "-i", given, "-o", str(directory), "-p", precision]
        done = subprocess.run(
            [*command, "-e", "cpu", "-c", scratch],
            env={**os.environ, **QUIET, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode or not (directory / CONFIG).exists():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"model {source.label}: the builder of onnxruntime-genai cannot make {precision} of it ({reason})"
        )
