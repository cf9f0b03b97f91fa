# SPDX-License-Identifier: Apache-2.0
"""The precision that all backends share."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle
from pytest_llenergy.devices.lease import Lease


@pytest.fixture
def backend(backend: BackendHandle, gpus: Lease) -> BackendHandle:
    """The backend with the precision that all of them share."""
    if "dtype" not in backend.spec.capabilities.options:
        return backend
    return backend.with_options(dtype="bfloat16" if gpus.uuids else "float32")
