# SPDX-License-Identifier: Apache-2.0
"""The test of pytest-benchmark. Run it by its path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_work(benchmark: Any, work: Callable[[], int]) -> None:
    benchmark(work)
