# SPDX-License-Identifier: Apache-2.0
"""Convert models between formats and cache the results."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.models import ModelSource, explain_load_error
from pytest_llenergy.errors import ModelError
from pytest_llenergy.model.base import cache_directory

# Models that were built here, kept in the user's cache directory and used by every process.
#
# An entry is a directory that appears whole or not at all, with the checksum of each of its files. It is
# built by one process while the others wait for it.

MANIFEST = "llenergy-checksums.json"


def file_digest(path: Path) -> str:
    """BLAKE2b of a file, 128 bits in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def build_cached(name: str, build: Callable[[Path], None]) -> Path:
    """The directory ``name`` of the cache, built by ``build(directory)`` if it is missing or damaged.

    Raises ``ModelError`` when the cache cannot be written.
    """
    from filelock import FileLock

    root = cache_directory() / "models"
    entry = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not _is_intact(entry):
                _build_entry(entry, build)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {root} ({error}); set LLENERGY_CACHE_DIR to a directory "
            "with room"
        ) from error
    return entry


class _FileState(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    digest: str


def _build_entry(entry: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        build(scratch)
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(scratch)): _file_state(path) for path in files}
        (scratch / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        if entry.exists():
            shutil.rmtree(entry)
        scratch.rename(entry)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _file_state(path: Path) -> _FileState:
    state = path.stat()
    return _FileState(state.st_size, state.st_mtime_ns, file_digest(path))


def _is_intact(entry: Path) -> bool:
    try:
        manifest = msgspec.json.decode((entry / MANIFEST).read_bytes(), type=dict[str, _FileState])
        return all(_is_unchanged(entry / name, file) for name, file in manifest.items())
    except (OSError, msgspec.DecodeError):
        return False


def _is_unchanged(path: Path, file: _FileState) -> bool:
    """Untouched since it was built, or else still of the same content."""
    state = path.stat()
    if state.st_size != file.size:
        return False
    return state.st_mtime_ns == file.mtime_ns or file_digest(path) == file.digest


# Directories that transformers can load, made of what it cannot load fast or at all.
#
# Reading a GGUF file through transformers dequantises it anew each time (tens of seconds); the same
# weights as bf16 safetensors load in about one. Runs in a rank, never in the pytest process.

#: Part of the cache key: raise it when the same input gives another directory.
CACHE_FORMAT = 1


def pretrained_path(source: ModelSource) -> str:
    """A path or hub id that ``from_pretrained`` takes; converts or builds on first use.

    Raises ``ModelError`` when that fails.
    """
    if source.directory:
        return source.directory
    if source.kind == "gguf":
        file = Path(source.location)
        key = f"{file.stem}-bf16-{file_digest(file)[:16]}-v{CACHE_FORMAT}"
        return str(build_cached(key, lambda directory: _convert_gguf(file, directory)))
    if source.kind == "random":
        key = f"random-{source.location}-v{CACHE_FORMAT}"
        return str(build_cached(key, lambda directory: _build_random(source.location, directory)))
    return source.location


def _convert_gguf(file: Path, directory: Path) -> None:
    try:
        import gguf as _gguf  # noqa: F401 - transformers imports it late and says less
    except ImportError:
        raise ModelError(f"{file.name}: reading GGUF needs the module gguf; pip install gguf") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        # A damaged file makes its reader fail anywhere, with anything.
        raise ModelError(f"{file.name}: transformers cannot read this GGUF file ({error})") from error
    # The weights are plain floats by now, but transformers refuses to save what was loaded quantised.
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)
    _save_pretrained(model.to(torch.bfloat16), tokenizer, directory)


def _save_pretrained(model: Any, tokenizer: Any, directory: Path) -> None:
    # In a process group transformers writes weights on rank 0 only; here any rank may convert.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _build_random(preset: str, directory: Path) -> None:
    import torch

    tokenizer = _byte_tokenizer()
    torch.manual_seed(0)
    model = _random_bert(len(tokenizer)) if preset == "bert-tiny" else _random_llama(preset, len(tokenizer))
    _save_pretrained(model.to(torch.bfloat16), tokenizer, directory)


def _byte_tokenizer() -> Any:
    """One token a byte, and none besides."""
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

    # Heads of 64 and even head counts, so that every engine's kernels and tensor parallelism of 2 fit.
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
    # The usual small initialisation makes all tokens nearly alike; these weights tell them apart.
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


# Directories that ONNX Runtime GenAI can load, made once of a model in another format.
#
# Its own model builder does that, in a process of its own: it imports torch, which the engine does not need.

#: Part of the cache key: raise it when the same input gives another directory.
CACHE_FORMAT = 1

#: What makes a directory one that the engine reads.
GENAI_CONFIG = "genai_config.json"

#: Without it ONNX Runtime starts a thread that reports to its makers, while energy is measured.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}

ONNX_BUILDER = "onnxruntime_genai.models.builder"
BUILDER_MODULES = ("torch", "transformers", "onnx_ir")


def is_onnx_directory(source: ModelSource) -> bool:
    """Whether the engine reads it as it is."""
    return source.kind == "directory" and (Path(source.location) / GENAI_CONFIG).exists()


def explain_missing_builder(source: ModelSource) -> str | None:
    """Which modules that the builder needs are not here, with the command that mends it."""
    absent = [module for module in BUILDER_MODULES if importlib.util.find_spec(module) is None]
    if not absent:
        return None
    return (
        f"onnxruntime needs the module {', '.join(absent)} to convert {source.label}; pip install "
        f"'pytest-llenergy[onnxruntime,transformers]', or name a directory that holds {GENAI_CONFIG}"
    )


def download_hub_model(source: ModelSource) -> ModelSource:
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
        raise ModelError(explain_load_error(source, error)) from error


def onnx_directory(source: ModelSource, precision: str, version: str) -> Path:
    """The model as ONNX of that ``precision`` (``fp32``, ``int8``, ``int4``), converted on first use.

    ``version`` is that of the builder. Raises ``ModelError`` when a module is missing or the builder fails.
    """
    key = f"{_source_key(source)}-onnx-{precision}-{version}-v{CACHE_FORMAT}"
    return build_cached(key, lambda directory: _run_onnx_builder(source, precision, directory))


def _source_key(source: ModelSource) -> str:
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


def _run_onnx_builder(source: ModelSource, precision: str, directory: Path) -> None:
    given = pretrained_path(source)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".builder-") as scratch:
        command = [sys.executable, "-m", ONNX_BUILDER, "-i", given, "-o", str(directory), "-p", precision]
        done = subprocess.run(
            [*command, "-e", "cpu", "-c", scratch],
            env={**os.environ, **NO_TELEMETRY, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode or not (directory / GENAI_CONFIG).exists():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"model {source.label}: the builder of onnxruntime-genai cannot make {precision} of it ({reason})"
        )


# Converting a model by pytest's own Python, for ranks of another one that cannot do it themselves.

#: In a process of its own: pytest's loads no framework. The search path is pytest's.
CONVERT_PROGRAM = """
import json, sys
source, path = json.loads(sys.argv[1])
sys.path[:] = path
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import ModelError
try:
    said = {"directory": pretrained_path(ModelSource(**source))}
except ModelError as error:
    said = {"error": str(error)}
print(json.dumps(said))
"""

#: Of a large file it takes minutes, once.
TIMEOUT_S = 3600.0


def convert_in_subprocess(source: ModelSource) -> ModelSource:
    """A model with the ``directory`` that was made of it; as it is where it needs no conversion.

    Raises ``ModelError`` when that fails.
    """
    if source.kind not in ("gguf", "random"):
        return source
    told = json.dumps([asdict(source), [path for path in sys.path if isinstance(path, str)]])
    try:
        done = subprocess.run(
            [sys.executable, "-c", CONVERT_PROGRAM, told],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            # It runs beside the test's devices, and not on them.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{source.label}: not converted within {TIMEOUT_S:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        last = said[-1] if said else f"exit code {done.returncode}"
        raise ModelError(
            f"{source.label}: pytest's own Python converts it for engines of other environments, and cannot "
            f"({last}); pip install 'pytest-llenergy[transformers]', or name a directory"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise ModelError(answer["error"])
    return replace(source, directory=answer["directory"])
