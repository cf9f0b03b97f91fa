# SPDX-License-Identifier: Apache-2.0
"""The plugin's side, as a user would write it. Its file name keeps it out of ``pytest benchmarks``."""

from __future__ import annotations

from speed_setting import NEW_TOKENS, PROMPT

from pytest_llenergy.api import BackendHandle, Energy


def test_same_work(energy: Energy, backend: BackendHandle) -> None:
    """Generate a fixed number of tokens, so that every round does the same work."""
    run = energy(backend.generate, [PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert run.result.output_tokens == NEW_TOKENS
