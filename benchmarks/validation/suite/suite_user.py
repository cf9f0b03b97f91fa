# SPDX-License-Identifier: Apache-2.0
"""What a user would compare with itself: decoding steps in a rank."""

from __future__ import annotations

from pytest_llenergy.api import Energy, Workers

from .in_rank import DRY, GPU, decode


@GPU
def test_decode(energy: Energy, workers: Workers) -> None:
    """The same steps each time."""
    energy(workers.call(decode, 1000 if DRY else 400))
