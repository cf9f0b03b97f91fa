# SPDX-License-Identifier: Apache-2.0
"""Write the page of backend capabilities."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.cli.doctor.capabilities import Fact, list_facts

from .text import capital, code, help_text, lines_of, page, table

#: Several narrow tables stay readable with ten backends.
TABLES = {
    "Processes and devices": ("launch", "hosts", "managed_by", "cpu", "gpu", "hardware"),
    "Parallelism": ("data", "tensor", "pipeline", "placement"),
    "Work": ("tasks", "batching", "sampling"),
    "Load options": ("options", "passes"),
    "Caches": ("prefix_cache", "caches"),
    "Times": ("timestamps",),
}

#: Facts whose reason is about what is not in their list.
LISTS = ("options", "sampling")

INTRODUCTION = """\
What each [backend](../backends.md) declares; anything else is refused. `llenergy doctor --backends` prints
this for the backends that are known on a machine, with the source of each fact."""


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
    parts.append(["## Reasons"])
    for backend, row in rows.items():
        reasons = list(_reasons(row.values()))
        if reasons:
            parts.append(list(lines_of(f"**{backend}**", reasons)))
    return page("# Capabilities of backends", INTRODUCTION, *parts)


def _install(spec: BackendSpec) -> str:
    is_command = re.fullmatch(r"pip install (\S+|'[^']*')", spec.install)
    return code(spec.install) if is_command else capital(help_text(spec.install))


def _reasons(row: Iterable[Fact]) -> Iterator[str]:
    for fact in row:
        if fact.reason:
            what = fact.title if fact.name in LISTS else f"{fact.title} is `{fact.value}`"
            yield f"- {what}: {fact.reason}"
