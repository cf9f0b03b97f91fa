# SPDX-License-Identifier: Apache-2.0
"""Energy of generating text: prefill, decode, batches, and two data-parallel ranks.

Every test runs once for each backend that is available here. ``ignore_eos`` keeps the number of tokens,
and so the work, the same in every run. GPUs are used where there are any; elsewhere the CPU, which the
records say.
"""

from __future__ import annotations

import pytest

from pytest_llenergy.handles import BackendHandle
from pytest_llenergy.model.prompts import Prompts
from pytest_llenergy.runs import Energy

pytestmark = pytest.mark.gpus(1, fallback="cpu")

DECODE_TOKENS = 12


def test_prefill(energy: Energy, backend: BackendHandle, prompts: Prompts) -> None:
    """The longest prompt and one token: nearly all of it is prefill."""
    longest = max(prompts, key=len)
    run = energy(backend.generate, [longest], max_new_tokens=1, ignore_eos=True)
    assert run.result.output_tokens == 1


def test_decode(energy: Energy, backend: BackendHandle, prompts: Prompts) -> None:
    """The shortest prompt: nearly all of it is decode."""
    shortest = min(prompts, key=len)
    run = energy(backend.generate, [shortest], max_new_tokens=DECODE_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == DECODE_TOKENS


@pytest.mark.parametrize("batch_size", [2, 4])
def test_batch(energy: Energy, backend: BackendHandle, prompts: Prompts, batch_size: int) -> None:
    """Prompts of mixed length in one padded batch."""
    batch = prompts[:batch_size]
    run = energy(backend.generate, batch, max_new_tokens=DECODE_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == batch_size * DECODE_TOKENS


@pytest.mark.gpus(2, fallback="cpu")
@pytest.mark.parallel(data=2)
def test_data_parallel(energy: Energy, backend: BackendHandle, prompts: Prompts) -> None:
    """The batch of four again, half of it on each of two ranks."""
    run = energy(backend.generate, prompts[:4], max_new_tokens=DECODE_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == 4 * DECODE_TOKENS
