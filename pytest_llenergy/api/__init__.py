# SPDX-License-Identifier: Apache-2.0
"""What fixtures return. Test files import the names below for annotations."""

from __future__ import annotations

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.energy import Energy, EnergyMeter, Run
from pytest_llenergy.api.workers import Call, Workers

__all__ = ["BackendHandle", "Call", "Energy", "EnergyMeter", "Run", "Workers"]
