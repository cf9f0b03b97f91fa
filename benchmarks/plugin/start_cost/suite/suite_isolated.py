# SPDX-License-Identifier: Apache-2.0
"""Twenty plain tests, each in a process of its own."""

from __future__ import annotations

import pytest
import work


@pytest.mark.gpus(1, fallback="cpu", isolate=True)
@pytest.mark.parametrize("i", range(20))
def test_generate(i: int) -> None:
    assert work.generate() == 8
