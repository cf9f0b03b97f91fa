# SPDX-License-Identifier: Apache-2.0
"""Ordinary GPU tests: torch in the test itself, nothing but the mark."""

from __future__ import annotations

import os

import pytest
import torch

from pytest_llenergy.api import Energy
from pytest_llenergy.devices.lease import Lease

from .in_rank import describe_visible_gpus, multiply, note


@pytest.mark.gpus(1)
@pytest.mark.parametrize("again", [1, 2])
def test_torch_sees_the_leased_gpu(gpus: Lease, again: int) -> None:
    """The test's own process computes on the leased GPU and sees no other."""
    seen = describe_visible_gpus()
    note(test="plain", again=again, pid=os.getpid(), lease=list(gpus.uuids), seen=seen)
    assert seen["uuids"] == list(gpus.uuids)
    ones = torch.ones(1024, device="cuda")
    assert float(ones.sum()) == 1024


@pytest.mark.gpus(1)
def test_energy_of_torch_in_the_test(energy: Energy) -> None:
    """Work in the test's own process has measured energy of the GPU."""
    run = energy(multiply, 0.3)
    note(test="energy", energy_j=run.energy_j, products=run.result)
    assert run.energy_j > 0
