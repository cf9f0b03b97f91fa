# SPDX-License-Identifier: Apache-2.0
"""What fixtures return, for annotations in test files, and what hooks call."""

from __future__ import annotations

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.energy import Energy, EnergyMeter, Run
from pytest_llenergy.api.workers import Call, Workers
from pytest_llenergy.measure.custom_metrics import add_metric

__all__ = ["BackendHandle", "Call", "Energy", "EnergyMeter", "Run", "Workers", "add_metric"]
