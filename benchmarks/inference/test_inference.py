# SPDX-License-Identifier: Apache-2.0
"""Energy of generating text: compare backends on one model.

Every test runs once per available backend. ``ignore_eos`` keeps the number of tokens, and so the work,
constant. Tests run on GPUs if there are any, else on the CPU; the records state which. All backends get the
same weights, arithmetic and cache type, so that their joules compare: ``float32`` on the CPU, where ONNX
Runtime has no other, and ``bfloat16`` on GPUs. A server runs with the types of its command.
"""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from pytest_llenergy.api import BackendHandle, Energy
from pytest_llenergy.plugin.default_prompts import Prompts

pytestmark = pytest.mark.gpus(1, fallback="cpu")

DECODE_TOKENS = 12


@pytest.mark.parametrize("words", [16, 128])
def test_prefill(energy: Energy, backend: BackendHandle, prompts: Prompts, words: int) -> None:
    """Almost pure prefill: a prompt of ``words`` words and one output token."""
    text = " ".join(islice(cycle(" ".join(prompts).split()), words))
    run = energy(backend.generate, [text], max_new_tokens=1, ignore_eos=True)
    assert run.result.output_tokens == 1


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_decode(energy: Energy, backend: BackendHandle, prompts: Prompts, batch_size: int) -> None:
    """Mostly decode: short prompts of two lengths in one batch."""
    batch = list(islice(cycle(sorted(prompts, key=len)[:2]), batch_size))
    run = energy(backend.generate, batch, max_new_tokens=DECODE_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == batch_size * DECODE_TOKENS


@pytest.mark.gpus(2, fallback="cpu")
@pytest.mark.parallel(data=2)
def test_data_parallel(energy: Energy, backend: BackendHandle, prompts: Prompts) -> None:
    """Split a batch of four over two ranks."""
    batch = 2 * sorted(prompts, key=len)[:2]
    run = energy(backend.generate, batch, max_new_tokens=DECODE_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == 4 * DECODE_TOKENS
