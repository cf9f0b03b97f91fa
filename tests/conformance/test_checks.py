# SPDX-License-Identifier: Apache-2.0
"""Which prefix caches the suite finds: the limit that docs/extending.md states."""

from __future__ import annotations

import pytest

from pytest_llenergy.conformance.checks import PrefillTimes


@pytest.mark.parametrize(
    ("spared", "found"), [(0.0, False), (0.24, False), (0.26, True), (0.5, True), (7 / 8, True), (1.0, True)]
)
def test_a_cache_that_saves_a_quarter_of_a_prompt_is_found(spared: float, found: bool) -> None:
    """Of the second that a new prompt takes beyond a short one, which takes a tenth."""
    seen_s = 0.1 + (1 - spared)
    # One disturbed pair does not decide.
    times = PrefillTimes(
        short_s=0.1, new_s=[1.1, 1.1, 9.0, 1.1], seen_s=[seen_s, 9.0, seen_s, seen_s], length=512
    )
    assert (times.wrong is not None) is found
