# SPDX-License-Identifier: Apache-2.0
"""Comparisons in every form that they can be shown in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_llenergy.model.comparison import ComparedReports
    from pytest_llenergy.model.paired import PairedReport
    from pytest_llenergy.model.report import Report

#: For a terminal, a pull request, a program, GitHub's log, GitLab's widget, and whatever reads JUnit.
Format = Literal["text", "markdown", "json", "github", "gitlab", "junit", "html"]

FORMATS: tuple[Format, ...] = ("text", "markdown", "json", "github", "gitlab", "junit", "html")


@dataclass(frozen=True)
class Found:
    """A comparison, and the two reports that it is of; ``pairs`` where they were measured in turn."""

    compared: ComparedReports
    reports: tuple[Report, Report]
    pairs: str | None = None

    @classmethod
    def of(cls, paired: PairedReport) -> Found:
        """What ``llenergy ab`` wrote."""
        return cls(paired.compared, (paired.base, paired.head), paired.pairs)


def render(found: Found, form: Format, width: int = 80, *, color: bool = False) -> str:
    """What to print, without its last line break. ``width`` and ``color`` are for ``text``.

    ``github`` also appends the Markdown to the file that ``GITHUB_STEP_SUMMARY`` names. Raises
    ``ReportError`` where that cannot be written.
    """
    return _rendered(found, form, width, color=color).removesuffix("\n")


def _rendered(found: Found, form: Format, width: int, *, color: bool) -> str:
    compared = found.compared
    if form == "html":
        from pytest_llenergy.report.html.page import render_compared

        return render_compared(*found.reports, compared, pairs=found.pairs)
    if form == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(compared)).decode()
    if form == "markdown":
        from pytest_llenergy.report.comment import render_comment

        return render_comment(compared)
    if form == "github":
        from pytest_llenergy.report.github import append_summary, commands

        append_summary(compared)
        return commands(compared)
    if form == "gitlab":
        from pytest_llenergy.report.gitlab import metrics_report

        return metrics_report(compared)
    if form == "junit":
        from pytest_llenergy.report.junit import junit_xml

        return junit_xml(compared)
    from pytest_llenergy.model.text import one_line
    from pytest_llenergy.report.verdicts import render_verdicts

    table = render_verdicts(compared.comparisons, width, color=color)
    return "\n".join([table, *map(one_line, [*compared.devices, *compared.notes])])
