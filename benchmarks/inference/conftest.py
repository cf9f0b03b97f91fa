# SPDX-License-Identifier: Apache-2.0
"""The precision that all backends share, and how their threads wait for each other."""

from __future__ import annotations

import os

import pytest

from pytest_llenergy.api import BackendHandle
from pytest_llenergy.devices.lease import Lease

# torch and llama.cpp wait in barriers of libgomp, which spins 300,000 times before it sleeps. Beside other
# processes, one thread then spins while the next has no CPU: rounds take four times as long and as many
# joules. Ranks inherit this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture
def backend(backend: BackendHandle, gpus: Lease) -> BackendHandle:
    """The backend with the precision that all of them share."""
    if "dtype" not in backend.spec.capabilities.options:
        return backend
    return backend.with_options(dtype="bfloat16" if gpus.uuids else "float32")
