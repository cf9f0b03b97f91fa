# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, for engines that are given these and not text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_llenergy.errors import BackendError


def encoded(engine: str, tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The token ids of each prompt. Raises ``BackendError`` for a prompt that has none."""
    ids = [[int(token) for token in tokenizer.encode(prompt)] for prompt in prompts]
    if not all(ids):
        raise BackendError(f"{engine}: a prompt has no tokens; leave empty prompts out")
    return ids


def first_line(error: BaseException) -> str:
    """What an error of an engine says first; of pydantic's its first field."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        place = ".".join(map(str, first["loc"]))
        said = str(first["msg"]).removeprefix("Value error, ").splitlines()[0]
        return f"{place}: {said}" if place else said
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
