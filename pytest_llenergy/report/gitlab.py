# SPDX-License-Identifier: Apache-2.0
"""Comparisons as a metrics report of GitLab (``artifacts:reports:metrics``): OpenMetrics text.

GitLab compares the *text* of each value with that of the target branch, and shows first what is not the same.
Joules never are, so what is written is the change: 0 for every test that is unchanged, to the letter.
"""

from __future__ import annotations

from collections import Counter

from pytest_llenergy.model.comparison import STATES, ComparedReports, Comparison
from pytest_llenergy.model.text import visible
from pytest_llenergy.report.openmetrics import Family, Sample, render

#: Decimal places of a change: a tenth of a per cent.
PLACES = 3


def metrics_report(compared: ComparedReports) -> str:
    """How many tests have come to what, and the change of each that was judged.

    What is inconclusive is ``NaN``, what was not judged is absent.
    """
    counts = Counter(each.verdict for each in compared.comparisons)
    tests = Family(
        "llenergy_comparisons",
        "Comparisons by verdict.",
        [Sample({"verdict": state}, str(counts[state])) for state in STATES],
    )
    changes = Family(
        "llenergy_change_ratio",
        "Relative change from the base; 0 where unchanged, NaN where it cannot be told.",
        [
            Sample({"test": _label(each.id), "metric": _label(each.metric)}, _change(each))
            for each in compared.comparisons
            if each.judged
        ],
        unit="ratio",
    )
    return render([tests, changes])


def _change(comparison: Comparison) -> str:
    if comparison.verdict == "inconclusive" or comparison.ratio is None:
        return "NaN"
    return "0" if comparison.verdict == "unchanged" else f"{comparison.ratio - 1:+.{PLACES}f}"


def _label(name: str) -> str:
    """GitLab takes what follows a hash for a comment, wherever it stands (``parsers/metrics/generic.rb``).

    What cannot be seen is escaped; line breaks are left to the format, which has an escape of its own.
    """
    return "\n".join(visible(line) for line in name.replace("#", "%23").split("\n"))
