# SPDX-License-Identifier: Apache-2.0
"""Write the page of hooks from ``pytest_llenergy.hookspecs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pytest_llenergy import hookspecs

from .text import lines_of, page, parameters, prose

INTRODUCTION = """\
Hooks for `conftest.py` and other plugins. An implementation may omit arguments that it does not use.
[Write a backend](../extending.md) and [write a meter](../writing-a-meter.md) have examples."""


def hooks() -> list[Callable[..., Any]]:
    """Return the hooks in the order of the file."""
    return [each for name, each in vars(hookspecs).items() if name.startswith("pytest_llenergy_")]


def hooks_page() -> str:
    """Return the whole page."""
    return page("# Hooks", INTRODUCTION, *(list(_hook(each)) for each in hooks()))


def _hook(hook: Callable[..., Any]) -> Iterator[str]:
    returned = inspect.signature(hook).return_annotation
    first = getattr(hook, "pytest_spec", {}).get("firstresult")
    types = [f"`{each.name}: {each.annotation}`" for each in inspect.signature(hook).parameters.values()]
    yield from lines_of(
        f"## {hook.__name__}",
        f"`{hook.__name__}{parameters(hook)}`",
        prose(hook.__doc__),
        f"Arguments: {', '.join(types)}. Returns `{returned}`."
        + (" The first result that is not `None` counts." if first else ""),
    )
