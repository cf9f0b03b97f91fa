# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the whole suite."""

from __future__ import annotations

from .nvml_sim.fixtures import nvml_attach, nvml_library

__all__ = ["nvml_attach", "nvml_library"]

pytest_plugins = ["pytester"]
