# SPDX-License-Identifier: Apache-2.0
"""Generate text with a real model. Run it by its path: ``pytest benchmarks`` does not collect it."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle, Energy
from pytest_llenergy.plugin.default_prompts import Prompts


@pytest.mark.gpus(1, fallback="cpu")
def test_decode(energy: Energy, backend: BackendHandle, prompts: Prompts, new_tokens: int) -> None:
    """Generate from the shortest prompt, so that nearly all of the work is decode."""
    shortest = min(prompts, key=len)
    run = energy(backend.generate, [shortest], max_new_tokens=new_tokens, ignore_eos=True)
    assert run.result.output_tokens == new_tokens
