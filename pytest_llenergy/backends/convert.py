# SPDX-License-Identifier: Apache-2.0
"""Convert models to formats that backends read, once, into the user's cache directory.

An entry of the cache is a directory that appears whole or not at all. One process builds it while the others
wait.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.models import ModelSource, resolve_model, translate_load_errors
from pytest_llenergy.errors import ModelError
from pytest_llenergy.record.base import cache_directory
from pytest_llenergy.scratch import ScratchDirectory

#: Part of every cache key: increase it when the same input gives a different directory.
CACHE_FORMAT = 3

#: A directory with this file is an ONNX Runtime GenAI model.
GENAI_CONFIG = "genai_config.json"

#: Stops the telemetry thread that ONNX Runtime would run while energy is measured.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}

#: Model builder of ONNX Runtime GenAI. Runs in a subprocess: it imports torch, which inference does not need.
ONNX_BUILDER = "onnxruntime_genai.models.builder"
BUILDER_MODULES = ("torch", "transformers", "onnx_ir")


def build_cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return a directory of the cache; ``build(directory)`` fills it if it is missing.

    Raises:
        ModelError: If the cache cannot be written.
    """
    from filelock import FileLock

    root = cache_directory() / "models"
    entry = root / f"{name}-v{CACHE_FORMAT}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                _build_entry(entry, build)
    except OSError as error:
        raise ModelError(
            f"cannot store the converted model in {root} ({error}); set LLENERGY_CACHE_DIR to a directory "
            "with room"
        ) from error
    return entry


def _build_entry(entry: Path, build: Callable[[Path], None]) -> None:
    with ScratchDirectory(entry.parent) as directory:
        build(directory.path)
        directory.path.rename(entry)


def pretrained_path(source: ModelSource) -> str:
    """Return a path or hub id for ``from_pretrained``; converts or builds the model on first use.

    Reading a GGUF file through transformers dequantises it each time (tens of seconds); the same weights as
    bf16 safetensors load in about one. Runs in a rank or a subprocess, never in the pytest process.

    Raises:
        ModelError: If the model cannot be converted or built.
    """
    if source.directory:
        return source.directory
    if source.kind == "gguf":
        key = f"{source_key(source)}-bf16"
        return str(build_cached(key, lambda directory: _convert_gguf(source, directory)))
    if source.kind == "random":
        return str(build_cached(source_key(source), lambda directory: _build_random(source, directory)))
    return source.location


def _convert_gguf(source: ModelSource, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(source.location)
    # A damaged file can make its reader raise anything.
    with translate_load_errors("transformers", source):
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain floats now, but transformers refuses to save a model loaded as quantised.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
    _save_pretrained(model.to(torch.bfloat16), tokenizer, directory)


def _save_pretrained(model: Any, tokenizer: Any, directory: Path) -> None:
    # In a process group transformers writes weights on rank 0 only; here any rank may convert.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _build_random(source: ModelSource, directory: Path) -> None:
    import torch

    preset = source.location
    tokenizer = _byte_tokenizer()
    torch.manual_seed(0)
    model = _random_bert(len(tokenizer)) if preset == "bert-tiny" else _random_llama(preset, len(tokenizer))
    _save_pretrained(model.to(torch.bfloat16), tokenizer, directory)


def _byte_tokenizer() -> Any:
    """A tokenizer with one token per byte and no others but the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _random_llama(preset: str, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # Heads of 64 and even head counts fit every backend's kernels and tensor parallelism of 2.
    shape = {
        "llama-tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2},
        "llama-135m": {"hidden_size": 640, "intermediate_size": 1536, "num_hidden_layers": 30},
    }[preset]
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **shape,
    )
    model: Any = LlamaForCausalLM(config)
    # The usual small initialisation makes all tokens nearly equally likely; these weights separate them.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def _random_bert(vocabulary: int) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
        )
    )


def is_onnx_directory(source: ModelSource) -> bool:
    """Whether ONNX Runtime GenAI can read the model as it is."""
    return source.kind == "directory" and (Path(source.location) / GENAI_CONFIG).exists()


def explain_missing_builder(source: ModelSource) -> str | None:
    """Return which modules the builder lacks and how to install them; None if it can run."""
    absent = [module for module in BUILDER_MODULES if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    return (
        f"onnxruntime needs the module {', '.join(absent)} to convert {source.label}; pip install "
        f"'pytest-llenergy[onnxruntime]', or name a directory that holds {GENAI_CONFIG}"
    )


def download_hub_model(source: ModelSource) -> ModelSource:
    """Download a hub model and return its directory, whose name is the commit. Returns other models
    unchanged.

    Raises:
        ModelError: If the download fails.
    """
    if source.kind != "hub":
        return source
    with translate_load_errors("huggingface_hub", source):
        from huggingface_hub import snapshot_download

        return ModelSource("directory", snapshot_download(source.location))


def onnx_directory(source: ModelSource, precision: str, version: str) -> Path:
    """Return the model as ONNX, converted on first use.

    Args:
        source: Model to convert.
        precision: ``fp32``, ``int8`` or ``int4``.
        version: Version of the builder, part of the cache key.

    Raises:
        ModelError: If a module is missing or the builder fails.
    """
    key = f"{source_key(source)}-onnx-{precision}-{version}"
    return build_cached(key, lambda directory: _run_onnx_builder(source, precision, directory))


def source_key(source: ModelSource) -> str:
    """Return the part of a cache key that stands for a model: it changes with the content.

    Raises:
        ModelError: If the configuration of a hub model, whose directory names the commit, cannot be had.
    """
    if source.kind == "random":
        return f"random-{source.location}"
    if source.kind == "hub":
        return f"{source.location.replace('/', '--')}-{_hub_commit(source)[:16]}"
    path = Path(source.location)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    # Reading all weights would take longer than loading them.
    listing = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.blake2b(repr(listing).encode(), digest_size=8).hexdigest()
    return f"{path.stem if path.is_file() else path.name}-{digest}"


def _hub_commit(source: ModelSource) -> str:
    with translate_load_errors("huggingface_hub", source):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source.location, "config.json")).parent.name


def _run_onnx_builder(source: ModelSource, precision: str, directory: Path) -> None:
    path = pretrained_path(source)
    with ScratchDirectory(directory.parent) as scratch:
        command = [sys.executable, "-m", ONNX_BUILDER, "-i", path, "-o", str(directory), "-p", precision]
        done = subprocess.run(
            [*command, "-e", "cpu", "-c", str(scratch.path)],
            env={**os.environ, **NO_TELEMETRY, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode or not (directory / GENAI_CONFIG).exists():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"model {source.label}: onnxruntime-genai's builder cannot convert it to {precision} ({reason})"
        )


#: Runs in a subprocess, since pytest's own process loads no framework. The module search path is pytest's.
CONVERT_PROGRAM = """
import json, sys
source, path = json.loads(sys.argv[1])
sys.path[:] = path
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import ModelError
try:
    print(pretrained_path(ModelSource(**source)))
except ModelError as error:
    sys.exit(str(error))
"""


def convert_in_subprocess(source: ModelSource) -> ModelSource:
    """Convert a model with pytest's own Python, for ranks whose Python cannot convert it themselves.

    Returns:
        The model with its ``directory`` set; unchanged if it needs no conversion.

    Raises:
        ModelError: If the conversion fails.
    """
    if source.kind not in ("gguf", "random"):
        return source
    argument = json.dumps([asdict(source), [path for path in sys.path if isinstance(path, str)]])
    done = subprocess.run(
        [sys.executable, "-c", CONVERT_PROGRAM, argument],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        # Keep it off the devices of the test.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{source.label}: pytest's own Python converts it for backends in other environments, and failed "
            f"({reason}); pip install 'pytest-llenergy[transformers]', or name a directory"
        )
    return replace(source, directory=done.stdout.splitlines()[-1])


def convert_draft_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the model of the load option ``speculative`` in the same way. Returns the options.

    Raises:
        ModelError: If it does not exist, or the conversion fails.
    """
    draft = options.get("speculative")
    name = draft.get("model") if isinstance(draft, Mapping) else None
    directory = convert_in_subprocess(resolve_model(name)).directory if isinstance(name, str) else ""
    return {**options, "speculative": {**draft, "model": directory}} if draft and directory else dict(options)
