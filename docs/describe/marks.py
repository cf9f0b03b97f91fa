# SPDX-License-Identifier: Apache-2.0
"""Write the page of marks from ``pytest_llenergy.plugin.marks``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from pytest_llenergy.plugin.marks import MARKS

from .text import capital, code, help_text, lines_of, page, table, typed

#: Further reading for each mark.
SEE = {
    "gpus": "[which GPUs](../devices.md#which-gpus), [leases](../devices.md#leases)",
    "gpu_settings": "[power limits and clocks](../devices.md#power-limits-and-clocks)",
    "parallel": "[several GPUs](../several-gpus.md)",
    "energy_options": "[settings of one test](../writing-tests.md#settings-of-one-test), "
    "[procedure](../how-it-measures.md#the-procedure)",
    "backend_options": "[backends](../backends.md#selecting-backends-for-a-test)",
    "backend_needs": "[backends](../backends.md#selecting-backends-for-a-test), [capabilities](backends.md)",
    "energy_gate": "[comparing](../comparing.md#in-pytest), [budgets](../writing-tests.md#budgets)",
}

INTRODUCTION = """\
Put marks on a function, class, module or parameter; the closest counts. Wrong arguments are errors at
collection. `pytest --markers` prints the same."""


def marks_page() -> str:
    """Return the whole page."""
    return page("# Marks", INTRODUCTION, *(list(_mark(mark.__name__)) for mark in MARKS))


def _mark(name: str) -> Iterator[str]:
    mark = next(each for each in MARKS if each.__name__ == name)
    # The docstring begins with the signature, which pytest prints.
    text = inspect.getdoc(mark) or ""
    about = help_text(text.partition("): ")[2] or text)
    yield from lines_of(f"## {name}", capital(about), _parameters(name), f"See {SEE[name]}.")


def _parameters(name: str) -> Sequence[str]:
    mark = next(each for each in MARKS if each.__name__ == name)
    rows = []
    for each in inspect.signature(mark).parameters.values():
        any_name = each.kind is inspect.Parameter.VAR_KEYWORD
        given = f"**{each.name}" if any_name else each.name
        default = "" if each.default is inspect.Parameter.empty else repr(each.default)
        rows.append([code(given), code(typed(each.annotation)), code(default)])
    return table(["argument", "type", "default"], rows)
