# SPDX-License-Identifier: Apache-2.0
"""What fixtures return, for annotations in test files, and what hooks call."""

from __future__ import annotations

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.energy import Energy
from pytest_llenergy.api.energy_meter import EnergyMeter
from pytest_llenergy.api.run import LoadRun, Run
from pytest_llenergy.api.workers import Call, Workers
from pytest_llenergy.measure.custom_metrics import add_metric

__all__ = ["BackendHandle", "Call", "Energy", "EnergyMeter", "LoadRun", "Run", "Workers", "add_metric"]
