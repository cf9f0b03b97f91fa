# SPDX-License-Identifier: Apache-2.0
"""Twenty tests, each in a spawned process."""

from __future__ import annotations

import multiprocessing

import pytest
import work


@pytest.mark.parametrize("i", range(20))
def test_generate(i: int) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(work.generate) == 8
