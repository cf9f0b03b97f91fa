# SPDX-License-Identifier: Apache-2.0
"""How many positions a model was made for, from the head of its file and without reading the whole of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

from pytest_llenergy.backends.model import ModelSource

#: Of GGUF's numbers by their type: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9

#: Bytes that a name may have.
_LONGEST = 65535


def positions(model: ModelSource) -> int | None:
    """Of a GGUF file, or of a directory with a config.json; ``None`` where they are not told."""
    try:
        if model.kind == "gguf":
            with Path(model.location).open("rb") as file:
                told = _of_gguf(file)
        elif model.kind == "directory":
            config = json.loads((Path(model.location) / "config.json").read_bytes())
            told = config.get("max_position_embeddings")
        else:
            told = None
    except (OSError, ValueError, AttributeError, OverflowError, KeyError, struct.error):
        # Whether it can be loaded is for the engine to say.
        return None
    return told if isinstance(told, int) and told > 0 else None


def _of_gguf(file: BinaryIO) -> object:
    """``<architecture>.context_length``. The module gguf would read all of the vocabulary, for seconds."""
    _, _, _, pairs = struct.unpack("<4sIQQ", file.read(24))
    found: dict[str, object] = {}
    for _ in range(pairs):
        name = _string(file)
        found[name] = _value(file, *_unpack(file, "I"))
        wanted = f"{found.get('general.architecture')}.context_length"
        if wanted in found:
            return found[wanted]
    return None


def _value(file: BinaryIO, kind: int) -> object:
    """A number or a text; a list is passed over."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _unpack(file, _NUMBERS[kind])[0]
    kind, count = _unpack(file, "IQ")
    if kind == _STRING:
        for _ in range(count):
            file.seek(_unpack(file, "Q")[0], 1)
    else:
        file.seek(count * struct.calcsize(_NUMBERS[kind]), 1)
    return None


def _string(file: BinaryIO) -> str:
    """A long one is passed over: no name is, and the length in a damaged file may be anything."""
    (length,) = _unpack(file, "Q")
    if length > _LONGEST:
        file.seek(length, 1)
        return ""
    return file.read(length).decode(errors="replace")


def _unpack(file: BinaryIO, kinds: str) -> tuple[int, ...]:
    """Little-endian and packed."""
    layout = struct.Struct("<" + kinds)
    return layout.unpack(file.read(layout.size))
