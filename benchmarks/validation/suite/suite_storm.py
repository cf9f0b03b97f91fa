# SPDX-License-Identifier: Apache-2.0
"""A test that runs until it is killed."""

from __future__ import annotations

import os

from pytest_llenergy.api import Workers

from .in_rank import GPU, occupy


@GPU
def test_for_ever(workers: Workers) -> None:
    """Hold memory of the board."""
    workers.run(occupy, os.environ["LLENERGY_VALIDATION_READY"], 2048)
