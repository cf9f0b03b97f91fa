# SPDX-License-Identifier: Apache-2.0
"""Twenty tests on ranks of the plugin."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import Workers


@pytest.mark.parametrize("i", range(20))
def test_generate(workers: Workers, i: int) -> None:
    assert workers.run("work:generate") == [8]
