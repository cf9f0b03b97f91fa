# SPDX-License-Identifier: Apache-2.0
"""Text in the format of OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One value, already written, and what it is of. Labels without a value are left out."""

    labels: Mapping[str, str]
    value: str


@dataclass(frozen=True)
class Family:
    """A gauge and its samples; ``unit`` is then the last part of ``name``."""

    name: str
    help: str
    samples: Sequence[Sample]
    unit: str = ""


def render(families: Iterable[Family]) -> str:
    """Every family that has a sample, and the mark of the end."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# TYPE {family.name} gauge")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {escaped(family.help)}")
        lines += [f"{family.name}{_labels(each.labels)} {each.value}" for each in family.samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def escaped(text: str) -> str:
    """As in the value of a label, or a help text."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items() if text)
    return f"{{{told}}}" if told else ""
