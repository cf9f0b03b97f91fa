# SPDX-License-Identifier: Apache-2.0
"""The plugin's side, as a user would write it.

The file name keeps it out of ``pytest benchmarks``; ``compare.py`` names it explicitly. Without a ``gpus``
mark it always runs on the CPU.
"""

from __future__ import annotations

from setting import BATCH_SIZE, DTYPE, NEW_TOKENS, PROMPT, SEED

from pytest_llenergy.api import BackendHandle, Energy


def test_same_work(energy: Energy, backend: BackendHandle) -> None:
    """Generate one batch with a fixed number of tokens, so that every round does the same work."""
    backend = backend.with_options(dtype=DTYPE)
    run = energy(
        backend.generate, [PROMPT] * BATCH_SIZE, max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=SEED
    )
    assert run.result.output_tokens == BATCH_SIZE * NEW_TOKENS
