# SPDX-License-Identifier: Apache-2.0
"""One model on one rank and in shards on two.

SmolLM2 has nine heads, which two ranks cannot share; these are random weights of its size with ten.
"""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle, Energy
from pytest_llenergy.model.prompts import Prompts

TOKENS = 8


@pytest.fixture
def energy_model() -> str:
    return "random:llama-135m"


ONE = pytest.mark.gpus(1, fallback="cpu")
TWO = (pytest.mark.gpus(2, fallback="cpu"), pytest.mark.parallel(tensor=2))


@pytest.mark.parametrize("shards", [pytest.param(1, marks=ONE), pytest.param(2, marks=TWO)])
def test_tensor_parallel(energy: Energy, backend: BackendHandle, prompts: Prompts, shards: int) -> None:
    """The same work, with each layer whole or a half of it on each of two ranks."""
    run = energy(backend.generate, [min(prompts, key=len)], max_new_tokens=TOKENS, ignore_eos=True)
    assert run.result.output_tokens == TOKENS
