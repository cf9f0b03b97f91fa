# SPDX-License-Identifier: Apache-2.0
"""Energy of one model on one rank and split over two.

SmolLM2 has nine attention heads, which cannot be split in two; this model has random weights, the same size
and ten heads.
"""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle, Energy
from pytest_llenergy.plugin.default_prompts import Prompts

TOKENS = 8


@pytest.fixture
def energy_model() -> str:
    return "random:llama-135m"


ONE = pytest.mark.gpus(1, fallback="cpu")
TWO = (pytest.mark.gpus(2, fallback="cpu"), pytest.mark.parallel(tensor=2))


@pytest.mark.parametrize("shards", [pytest.param(1, marks=ONE), pytest.param(2, marks=TWO)])
def test_tensor_parallel(energy: Energy, backend: BackendHandle, prompts: Prompts, shards: int) -> None:
    """Run the same work with whole layers on one rank, or half of each layer on each of two ranks."""
    run = energy(backend.generate, [min(prompts, key=len)], max_new_tokens=TOKENS, ignore_eos=True)
    assert run.result.output_tokens == TOKENS
