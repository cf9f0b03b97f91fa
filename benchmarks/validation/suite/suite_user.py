# SPDX-License-Identifier: Apache-2.0
"""Decoding steps in a rank: the work that the user's part compares with itself."""

from __future__ import annotations

from pytest_llenergy.api import Energy, Workers

from .in_rank import DRY, GPU, decode


@GPU
def test_decode(energy: Energy, workers: Workers) -> None:
    """Run the same steps each time."""
    energy(workers.call(decode, 1000 if DRY else 400))
