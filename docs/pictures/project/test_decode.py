# SPDX-License-Identifier: Apache-2.0
"""The test of the README."""

from __future__ import annotations

import pytest


@pytest.mark.gpus(1, fallback="cpu")
@pytest.mark.backend_options(dtype="float32")
@pytest.mark.parametrize("batch_size", [1, 8])
def test_decode(energy, backend, prompts, batch_size):
    run = energy(backend.generate, prompts[:batch_size], max_new_tokens=32)
    assert run.energy_per_output_token_j < 2.0
