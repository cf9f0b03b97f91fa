# SPDX-License-Identifier: Apache-2.0
"""What a check tells of a power reading."""

from __future__ import annotations

import pytest

from pytest_llenergy.meters.checkresult import CheckResult
from pytest_llenergy.meters.refresh import Refresh, refresh_seen, refreshed_every


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # Each refresh is looked for, and its joules are those of the refresh before.
        (CheckResult(1.0, power_period_s=0.1), refreshed_every(0.1)),
        # It moves all the time: what it tells is of the moment.
        (CheckResult(1.0, power_period_s=0.002, power_continuous=True), Refresh(0.002, 0.002)),
        # Refreshed too often to look for each.
        (CheckResult(1.0, power_period_s=0.01), Refresh(0.01, 0.01, (0.0, 0.02))),
        # It did not change, or nobody looked.
        (CheckResult(1.0), Refresh(0.1, 0.1, (0.0, 0.2), known=False)),
        (None, Refresh(0.1, 0.1, (0.0, 0.2), known=False)),
    ],
)
def test_a_refresh_is_what_was_seen_or_is_not_known(result: CheckResult | None, expected: Refresh) -> None:
    assert refresh_seen(result, slowest_s=0.1) == expected
