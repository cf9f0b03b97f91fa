# SPDX-License-Identifier: Apache-2.0
"""Record what a rank sees of the host's GPUs."""

from __future__ import annotations

import pytest

# A test file that imports torch must not initialise CUDA in pytest's process.
import torch

from pytest_llenergy.api import Workers
from pytest_llenergy.devices.lease import Lease

from .in_rank import describe_visible_gpus, note


@pytest.mark.gpus(1)
def test_a_rank_sees_its_lease_and_nothing_else(workers: Workers, gpus: Lease) -> None:
    """Compare the lease, the rank's environment and CUDA's device properties."""
    (seen,) = workers.run(describe_visible_gpus)
    note(lease=list(gpus.uuids), seen=seen, initialised=torch.cuda.is_initialized())
    assert seen["uuids"] == list(gpus.uuids)
    assert seen["visible"] == gpus.visible_devices
