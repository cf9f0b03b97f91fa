# SPDX-License-Identifier: Apache-2.0
"""The test of ``llenergy ab``. Run it by its path."""

from __future__ import annotations

from collections.abc import Callable

from pytest_llenergy.api import Energy


def test_work(energy: Energy, work: Callable[[], int]) -> None:
    energy(work)
