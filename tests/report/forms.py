# SPDX-License-Identifier: Apache-2.0
"""A comparison in a form that shows nothing else of its reports."""

from __future__ import annotations

from pytest_llenergy.cli.compare import ComparisonResult, Format, render_comparison
from pytest_llenergy.record.comparison import ComparedReports

from ..record.reports import REPORT


def shown(compared: ComparedReports, form: Format) -> str:
    """The text."""
    return render_comparison(ComparisonResult(compared, (REPORT, REPORT)), form)
