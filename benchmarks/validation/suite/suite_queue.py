# SPDX-License-Identifier: Apache-2.0
"""A test that needs the only GPU for a while."""

from __future__ import annotations

import time

from pytest_llenergy.api import Workers
from pytest_llenergy.devices.lease import Lease

from .in_rank import GPU, multiply, note


@GPU
def test_a_turn(workers: Workers, gpus: Lease) -> None:
    """Record the start and end of the lease."""
    start_ns = time.monotonic_ns()
    workers.run(multiply, 1.0)
    note(start_ns=start_ns, end_ns=time.monotonic_ns(), lease=list(gpus.uuids))
