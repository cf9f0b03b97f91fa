# SPDX-License-Identifier: Apache-2.0
"""Tests that run an empty call on a rank, and tests that do nothing."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import Workers


@pytest.mark.parametrize("i", range(300))
def test_on_a_rank(workers: Workers, i: int) -> None:
    workers.run("builtins:int")


@pytest.mark.parametrize("i", range(300))
def test_here(i: int) -> None:
    assert i >= 0
