# SPDX-License-Identifier: Apache-2.0
"""The page of marks, of ``pytest_llenergy.marks``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from pytest_llenergy.marks import MARKS

from .text import capital, code, help_text, lines_of, page, table, typed

#: Where more is told of a mark, with an example.
SEE = {
    "gpus": "[which GPUs](../options.md#which-gpus), [sharing devices](../devices.md)",
    "parallel": "[parallelism](../backends.md#transformers-on-several-devices)",
    "backend_options": "[backends](../backends.md)",
    "backend_needs": "[backends](../backends.md), [engines](../engines.md)",
    "energy_gate": "[comparing](../comparing.md), [first steps](../first-steps.md#budgets)",
}

INTRODUCTION = """\
Marks of tests, on a function, a class, a module or a parameter; the closest counts.
Wrong arguments are errors at collection. `pytest --markers` shows the same."""


def marks_page() -> str:
    """The whole page."""
    return page("# Marks", INTRODUCTION, *(list(_mark(mark.__name__)) for mark in MARKS))


def _mark(name: str) -> Iterator[str]:
    mark = next(each for each in MARKS if each.__name__ == name)
    # Behind the signature, with which it begins.
    told = help_text((inspect.getdoc(mark) or "").partition("): ")[2])
    yield from lines_of(f"## {name}", capital(told), _parameters(name), f"See {SEE[name]}.")


def _parameters(name: str) -> Sequence[str]:
    mark = next(each for each in MARKS if each.__name__ == name)
    rows = []
    for each in inspect.signature(mark).parameters.values():
        any_name = each.kind is inspect.Parameter.VAR_KEYWORD
        given = f"**{each.name}" if any_name else each.name
        default = "" if each.default is inspect.Parameter.empty else repr(each.default)
        rows.append([code(given), code(typed(each.annotation)), code(default)])
    return table(["argument", "type", "default"], rows)
