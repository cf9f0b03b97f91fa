# SPDX-License-Identifier: Apache-2.0
"""Convert models to formats that backends read, once, into the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.models import ModelSource, make_random_model, translate_load_errors
from pytest_llenergy.errors import ModelError
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.record.base import cache_directory
from pytest_llenergy.scratch import ScratchDirectory

#: Part of every cache key: increase it when the same input gives a different directory.
CACHE_FORMAT = 3


def build_cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return a directory of the cache; ``build(directory)`` fills it if it is missing.

    It appears whole or not at all. One process builds it while the others wait.
    """
    from filelock import FileLock

    root = cache_directory() / "models"
    entry = root / f"{name}-v{CACHE_FORMAT}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                with ScratchDirectory(root) as directory:
                    build(directory.path)
                    directory.path.rename(entry)
    except OSError as error:
        raise ModelError(
            f"cannot store the converted model in {root} ({error}); set LLENERGY_CACHE_DIR to a directory "
            "with room"
        ) from error
    return entry


def pretrained_path(source: ModelSource) -> str:
    """Return a path or hub id for ``from_pretrained``; converts or builds the model on first use.

    Reading a GGUF file through transformers dequantises it each time (tens of seconds); the same weights as
    bf16 safetensors load in about one. Runs in a rank or a subprocess, never in the pytest process.
    """
    if source.directory:
        return source.directory
    if source.kind == "gguf":
        key = f"{source_key(source)}-bf16"
        return str(build_cached(key, lambda directory: _convert_gguf(source, directory)))
    if source.kind == "random":
        preset = source.location
        return str(
            build_cached(source_key(source), lambda made: _save_pretrained(*make_random_model(preset), made))
        )
    return source.location


def _convert_gguf(source: ModelSource, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(source.location)
    with translate_load_errors("transformers", source):
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain floats now, but transformers refuses to save a model loaded as quantised.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
    _save_pretrained(model, tokenizer, directory)


def _save_pretrained(model: Any, tokenizer: Any, directory: Path) -> None:
    import torch

    # In a process group transformers writes weights on rank 0 only; here any rank may convert.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def download_hub_model(source: ModelSource) -> ModelSource:
    """Download a hub model and return its directory, whose name is the commit; other models unchanged."""
    if source.kind != "hub":
        return source
    with translate_load_errors("huggingface_hub", source):
        from huggingface_hub import snapshot_download

        return ModelSource("directory", snapshot_download(source.location))


def source_key(source: ModelSource) -> str:
    """Return the part of a cache key that stands for a model: it changes with the content."""
    if source.kind == "random":
        return f"random-{source.location}"
    if source.kind == "hub":
        with translate_load_errors("huggingface_hub", source):
            from huggingface_hub import hf_hub_download

            commit = Path(hf_hub_download(source.location, "config.json")).parent.name
        return f"{source.location.replace('/', '--')}-{commit[:16]}"
    path = Path(source.location)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    # Reading all weights would take longer than loading them.
    listing = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.blake2b(repr(listing).encode(), digest_size=8).hexdigest()
    return f"{path.stem if path.is_file() else path.name}-{digest}"


def convert_in_subprocess(source: ModelSource) -> ModelSource:
    """Convert a model with pytest's own Python, for ranks whose Python cannot convert it themselves.

    In a subprocess, since pytest's own process loads no framework. Returns the model with its ``directory``
    set; unchanged if it needs no conversion.
    """
    if source.kind not in ("gguf", "random"):
        return source
    done = subprocess.run(
        module_command("pytest_llenergy.backends.convert", source.kind, source.location),
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if isinstance(path, str) and path),
            # Keep it off the devices of the test.
            **{"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        },
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{source.label}: pytest's own Python converts it for backends in other environments, and failed "
            f"({reason}); pip install 'pytest-llenergy[transformers]', or name a directory"
        )
    return replace(source, directory=done.stdout.splitlines()[-1])


if __name__ == "__main__":
    try:
        # Its kind is one of those that ``convert_in_subprocess`` passes.
        path = pretrained_path(ModelSource(*sys.argv[1:]))  # type: ignore[arg-type]
        sys.stdout.write(f"{path}\n")
    except ModelError as error:
        sys.exit(str(error))
