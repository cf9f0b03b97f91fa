# SPDX-License-Identifier: Apache-2.0
"""Plans of measurements for tests."""

from __future__ import annotations

from typing import Any

from pytest_llenergy.measure.round_plan import RoundPlan


def round_plan(**changes: Any) -> RoundPlan:
    """Return a plan of a few rounds with short gaps, with these changes."""
    plan = {"rounds": 4, "warmup": None, "gap_s": 0.1, "target": 0.02, "budget_s": 4.0}
    return RoundPlan(**{**plan, **changes})
