# SPDX-License-Identifier: Apache-2.0
"""Pages that several files look at."""

from __future__ import annotations

import pytest

from pytest_llenergy.report.html.page import render_report

from .pages import Pair, pair_shown


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_shown()[0]


@pytest.fixture(scope="module")
def compared_page() -> str:
    return pair_shown()[1]


@pytest.fixture(scope="module")
def report_page(pair: Pair) -> str:
    return render_report(pair.head)
