# SPDX-License-Identifier: Apache-2.0
"""Meters: cumulative joules per domain on the monotonic clock, and windows of them.

``measure()`` is all that a plain script needs.
"""

from __future__ import annotations

from pytest_llenergy.energy.window import Measuring, Window, measure

__all__ = ["Measuring", "Window", "measure"]
