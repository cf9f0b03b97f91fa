# SPDX-License-Identifier: Apache-2.0
"""Write the page of backend capabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.cli.doctor.capabilities import list_facts

from .text import capital, code, help_text, page, table

#: Several narrow tables stay readable with ten backends.
TABLES = {
    "Processes and devices": ("launch", "hosts", "cpu", "gpu"),
    "Parallelism": ("data", "tensor", "pipeline", "placement"),
    "Work": ("tasks", "caches", "timestamps"),
    "Load options": ("options", "passes"),
}

INTRODUCTION = """\
What each [backend](../backends.md) declares; anything else is refused. `llenergy doctor --backends` prints
this for the backends that are known on a machine."""


def backends_page(specs: Sequence[BackendSpec]) -> str:
    """Return the page with the capabilities of these backends."""
    rows = {spec.name: {fact.name: fact for fact in list_facts(spec.capabilities)} for spec in specs}
    some = next(iter(rows.values()))
    parts: list[Sequence[str]] = [
        table(["backend", "install"], [[spec.name, _install(spec)] for spec in specs]),
    ]
    for title, names in TABLES.items():
        head = ["backend", *(some[name].title for name in names)]
        cells = [[backend, *(row[name].value for name in names)] for backend, row in rows.items()]
        parts.append([f"## {title}", "", *table(head, cells)])
    return page("# Capabilities of backends", INTRODUCTION, *parts)


def _install(spec: BackendSpec) -> str:
    is_command = re.fullmatch(r"pip install (\S+|'[^']*')", spec.install)
    return code(spec.install) if is_command else capital(help_text(spec.install))
