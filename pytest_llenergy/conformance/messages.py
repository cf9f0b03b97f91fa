# SPDX-License-Identifier: Apache-2.0
"""What users read when a model or an option is none."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.conformance.in_rank import Refusal

#: No option can be this.
NO_VALUE = "no such value"


def bad_models(directory: Path) -> list[ModelSource]:
    """Models that can be found and not be loaded: a directory and a file, each of the right form."""
    broken = directory / "broken-model"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    file = directory / "broken-model.gguf"
    file.write_bytes(b"GGUF is how it begins, and nothing else is right")
    return [ModelSource("directory", str(broken)), ModelSource("gguf", str(file))]


def told(refusal: Refusal | None, what: str, named: str) -> str | None:
    """What is wrong with the refusal of ``what``, in which ``named`` should stand, or ``None``."""
    if refusal is None:
        return f"{what} was loaded without an error; raise ModelError or BackendError with one clear line"
    if not refusal.ours:
        return (
            f"{what}: load() raised {refusal.kind} ({_first(refusal.message)}); raise ModelError or "
            "BackendError with one clear line instead"
        )
    if not refusal.message.strip() or "\n" in refusal.message.strip():
        return f"{what}: the message of {refusal.kind} is no single line: {refusal.message!r}"
    if named not in refusal.message:
        return f"{what}: the message does not name {named!r}: {refusal.message}"
    return None


def _first(message: str) -> str:
    return (message.strip().splitlines() or ["no text"])[0]
