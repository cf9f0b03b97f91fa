# SPDX-License-Identifier: Apache-2.0
"""Requests like real traffic: prompts of a given length, data sets and traces."""

from __future__ import annotations

from pytest_llenergy.backends.traffic.datasets import dataset
from pytest_llenergy.backends.traffic.requests import Request, Requests
from pytest_llenergy.backends.traffic.synthetic import synthetic

__all__ = ["Request", "Requests", "dataset", "synthetic"]
