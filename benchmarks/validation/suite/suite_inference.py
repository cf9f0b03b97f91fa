# SPDX-License-Identifier: Apache-2.0
"""Text generation with models of three sizes and random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.api import BackendHandle, Energy

from .in_rank import DRY, GPU

MODES: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "eager": {"attention": "eager"},
    "compiled": {"attention": "sdpa", "compile": True},
}

#: Cases that may be cut for lack of time come last; batches of a model and mode are adjacent to load it once.
CELLS = (
    [("tiny", mode, batch) for mode in ("sdpa", "eager") for batch in (1, 8)]
    if DRY
    else [
        *((size, "sdpa", batch) for size in ("0.1b", "1b", "7b") for batch in (1, 8, 64)),
        ("1b", "compiled", 1),
        ("1b", "compiled", 8),
        *(("1b", "eager", batch) for batch in (1, 8, 64)),
        *(("7b", "eager", batch) for batch in (1, 8, 64)),
        ("7b", "compiled", 1),
        *(("0.1b", "eager", batch) for batch in (1, 8, 64)),
        *(("0.1b", "compiled", batch) for batch in (1, 8, 64)),
        ("1b", "compiled", 64),
        ("7b", "compiled", 8),
        ("7b", "compiled", 64),
    ]
)

#: Bytes of a prompt, one token each, and generated tokens.
PROMPT, NEW_TOKENS = (32, 8) if DRY else (256, 32)


@pytest.fixture
def energy_model(size: str) -> str:
    """Return a directory with a configuration and a tokenizer."""
    return str(Path(os.environ["LLENERGY_VALIDATION_MODELS"]) / size)


@GPU
@pytest.mark.parametrize(("size", "mode", "batch"), CELLS)
def test_generate(energy: Energy, backend: BackendHandle, size: str, mode: str, batch: int) -> None:
    """Generate a fixed number of tokens from prompts of one length."""
    prompts = [f"{place:03d} " + "joule " * PROMPT for place in range(batch)]
    backend = backend.with_options(dtype="bfloat16", **MODES[mode])
    run = energy(
        backend.generate,
        [prompt[:PROMPT] for prompt in prompts],
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        cache="static" if mode == "compiled" else "dynamic",
    )
    assert run.result.output_tokens == batch * NEW_TOKENS
