# SPDX-License-Identifier: Apache-2.0
"""Ranks that communicate, and ranks that are measured."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import Energy, Workers

from .in_rank import GPU, describe_visible_gpus, exchange, multiply, note


@GPU
def test_exchange(workers: Workers) -> None:
    """A single rank has a process group too."""
    (found,) = workers.run(exchange)
    note(test="exchange", **found)


@GPU
@pytest.mark.parametrize("again", [1, 2])
def test_multiply(energy: Energy, workers: Workers, again: int) -> None:
    """Work on the device of a rank, for each start method."""
    run = energy(workers.call(multiply, 0.3))
    note(test="multiply", again=again, products=run.result, seen=workers.run(describe_visible_gpus)[0])
