# SPDX-License-Identifier: Apache-2.0
"""Text generation with random weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_llenergy.api import BackendHandle, Energy

from .in_rank import DRY, GPU

CELLS = [("tiny", batch) for batch in (1, 8)] if DRY else [("1b", batch) for batch in (1, 8, 64)]

#: Bytes of a prompt, one token each, and generated tokens.
PROMPT, NEW_TOKENS = (32, 8) if DRY else (256, 32)


@pytest.fixture
def energy_model(size: str) -> str:
    """Return a directory with a configuration and a tokenizer."""
    return str(Path(os.environ["LLENERGY_VALIDATION_MODELS"]) / size)


@GPU
@pytest.mark.parametrize(("size", "batch"), CELLS)
def test_generate(energy: Energy, backend: BackendHandle, size: str, batch: int) -> None:
    """Generate a fixed number of tokens from prompts of one length."""
    prompts = [f"{place:03d} " + "joule " * PROMPT for place in range(batch)]
    backend = backend.with_options(dtype="bfloat16")
    run = energy(
        backend.generate,
        [prompt[:PROMPT] for prompt in prompts],
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
    )
    assert run.result.output_tokens == batch * NEW_TOKENS
