# SPDX-License-Identifier: Apache-2.0
"""The outcome of a comparison in one sentence: what the commands print, and the title of a comment."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.compare.gate import PASSED, exit_code, suggest_remedy
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison, Verdict
from pytest_llenergy.record.text import count_tests
from pytest_llenergy.report.verdicts import failing_verdicts, format_change, warning_verdicts, worsening

#: Verdicts that are counted although no test fails: nobody should take them for a pass.
NOT_PASSED: frozenset[Verdict] = frozenset(VERDICTS) - {"improved", "unchanged", "new", "no value"}


def describe_outcome(compared: ComparedReports, *, paired: bool) -> tuple[str, list[str]]:
    """Return pass, warning or fail, as the exit code says, and why; without a gate, the counts of verdicts.

    Nothing can pass without a gate. ``paired`` sides were measured in turn.
    """
    found = compared.comparisons
    gated = [each for each in found if each.gated]
    unmeasured = {each.id for each in found if each.base_status is not None}
    tests = len({each.id for each in found})
    fails = exit_code(compared) != PASSED
    warns = unmeasured or any(each.verdict in warning_verdicts(compared) for each in gated)
    state = "fail" if fails else "warning" if warns else "pass" if gated else "no gate"
    counted = failing_verdicts(compared) if fails else NOT_PASSED
    reasons = _count_verdicts(
        found if state == "no gate" else [each for each in gated if each.verdict in counted], tests
    )
    unsure = [each for each in gated if each.verdict == "inconclusive" and each.verdict in counted]
    if unsure and compared.inconclusive != "pass":
        reasons.append(suggest_remedy(unsure, "more pairs" if paired else "more rounds"))
    if unmeasured:
        reasons.append(f"{count_tests(len(unmeasured))} failed or skipped in the baseline")
    with_metric = [each for each in found if each.verdict != "no value"]
    if with_metric and all(each.verdict == "new" and each.gated for each in with_metric):
        reasons.append(f"no baseline: {count_tests(tests, 'new ')}")
    elif not any(each.rule_applied for each in found):
        reasons.append("nothing was compared")
    elif fails and not reasons:
        reasons.append("no gate could be checked")
    return state, reasons


def _count_verdicts(found: Sequence[Comparison], tests: int) -> list[str]:
    """Return texts such as ``1 of 48 tests regressed (+4.6%)`` and ``2 invalid``."""
    texts: list[str] = []
    for verdict in VERDICTS:
        named = [each for each in found if each.verdict == verdict]
        if not named:
            continue
        number = f"{len({each.id for each in named})}{'' if texts else f' of {count_tests(tests)}'}"
        worst = max(named, key=worsening)
        known = verdict in ("regressed", "worse") and worst.ratio is not None
        most = f" ({'up to ' if len(named) > 1 else ''}{format_change(worst.ratio)})" if known else ""
        texts.append(f"{number} {verdict}{most}")
    return texts
