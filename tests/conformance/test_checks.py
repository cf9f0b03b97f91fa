# SPDX-License-Identifier: Apache-2.0
"""Which prefix caches the suite finds: the limit that docs/extending.md states."""

from __future__ import annotations

import pytest

from pytest_llenergy.conformance.checks import PrefillTimes


@pytest.mark.parametrize(
    ("spared", "found"), [(0.0, False), (0.5, False), (0.65, False), (0.68, True), (7 / 8, True), (1.0, True)]
)
def test_a_cache_that_saves_two_thirds_of_a_prompt_is_found(spared: float, found: bool) -> None:
    """Of the second that a new prompt takes beyond a short one, which takes a tenth."""
    times = PrefillTimes(short_s=0.1, new_s=1.1, seen_s=0.1 + (1 - spared), length=512)
    assert (times.wrong is not None) is found
