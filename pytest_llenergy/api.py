# SPDX-License-Identifier: Apache-2.0
"""What fixtures return, for annotations in test files, and what hooks call."""

from __future__ import annotations

from pytest_llenergy.plugin.fixtures.backend_handle import BackendHandle
from pytest_llenergy.plugin.fixtures.energy import Energy
from pytest_llenergy.plugin.fixtures.energy_meter import EnergyMeter
from pytest_llenergy.plugin.fixtures.run import LoadRun, Run
from pytest_llenergy.plugin.fixtures.workers import Call, Workers
from pytest_llenergy.record.custom_metrics import add_metric

__all__ = ["BackendHandle", "Call", "Energy", "EnergyMeter", "LoadRun", "Run", "Workers", "add_metric"]
