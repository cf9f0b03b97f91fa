# SPDX-License-Identifier: Apache-2.0
"""What fixtures return, for annotations in test files, and what hooks call."""

from __future__ import annotations

from pytest_llenergy.plugin.handles.backend_handle import BackendHandle
from pytest_llenergy.plugin.handles.energy import Energy
from pytest_llenergy.plugin.handles.energy_meter import EnergyMeter
from pytest_llenergy.plugin.handles.run import LoadRun, Run
from pytest_llenergy.plugin.handles.workers import Call, Workers
from pytest_llenergy.record.custom_metrics import add_metric

__all__ = ["BackendHandle", "Call", "Energy", "EnergyMeter", "LoadRun", "Run", "Workers", "add_metric"]
