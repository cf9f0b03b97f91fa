# SPDX-License-Identifier: Apache-2.0
"""Every form that a comparison is printed in, by name."""

from __future__ import annotations

from pytest_llenergy.model.comparison import ComparedReports


def render(compared: ComparedReports, form: str, width: int, *, color: bool) -> str:
    """The comparison as ``text``, ``markdown`` or ``json``, without a last line break."""
    if form == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(compared)).decode()
    if form == "markdown":
        from pytest_llenergy.report.comment import render_comment

        return render_comment(compared).rstrip("\n")
    from pytest_llenergy.report.verdicts import render_verdicts

    table = render_verdicts(compared.comparisons, width, color=color)
    return "\n".join([table, *compared.devices, *compared.notes])
