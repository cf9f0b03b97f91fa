# SPDX-License-Identifier: Apache-2.0
"""Calls that do none of their work: they make a coroutine or a generator. Nothing would be measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pytest_llenergy.errors import PlanError

Result = TypeVar("Result")

FUNCTIONS = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
RESULTS = (inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen)

REFUSAL = (
    "a call of this function only makes a coroutine or generator; give a function that runs it, such as "
    "lambda: asyncio.run(f()) or lambda: list(f())"
)


def is_lazy(function: Callable[..., Any]) -> bool:
    """Whether a call is known to be lazy. Of many functions only what it returns tells: see ``finished``."""
    while isinstance(function, partial):
        function = function.func
    # That of an object with such a ``__call__`` too.
    return any(test(each) for test in FUNCTIONS for each in (function, type(function).__call__))


def finished(result: Result, who: str = "workers") -> Result:
    """What a call has returned. Raises ``PlanError`` in the name of ``who`` for what has yet to run."""
    if any(test(result) for test in RESULTS):
        if inspect.iscoroutine(result):
            # Else Python tells besides that nobody has awaited it.
            result.close()
        raise PlanError(f"{who}: {REFUSAL}")
    return result
