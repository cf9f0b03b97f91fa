# SPDX-License-Identifier: Apache-2.0
"""OpenMetrics 1.0, see https://prometheus.io/docs/specs/om/open_metrics_spec/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_llenergy.record.text import escape_lines


class Sample(NamedTuple):
    """One formatted value and its labels. Empty labels are left out."""

    labels: Mapping[str, str]
    value: str


class Family(NamedTuple):
    """A gauge and its samples. If it has a ``unit``, ``name`` ends with it."""

    name: str
    help: str
    samples: Sequence[Sample]
    unit: str = ""


def render_openmetrics_text(families: Iterable[Family]) -> str:
    """Render the families that have samples."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# TYPE {family.name} gauge")
            lines += [f"# UNIT {family.name} {family.unit}"] if family.unit else []
            lines.append(f"# HELP {family.name} {_escape(family.help)}")
            lines += [f"{family.name}{_format_labels(each.labels)} {each.value}" for each in family.samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _format_labels(labels: Mapping[str, str]) -> str:
    text = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items() if value)
    return f"{{{text}}}" if text else ""


def _escape(text: str) -> str:
    return escape_lines(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
