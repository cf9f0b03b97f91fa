# SPDX-License-Identifier: Apache-2.0
"""Calls of a test's own function: the tokens of each, and the refusal of calls that do no work."""

from __future__ import annotations

import functools
import inspect
import operator
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.record.record import Tokens

Result = TypeVar("Result")

#: The tokens of one call; None if the test does not say.
PerCall = int | Callable[[Any], int] | None

REFUSAL = (
    "a call of this function only makes a coroutine or generator; give a function that runs it, such as "
    "lambda: asyncio.run(f()) or lambda: list(f())"
)


def is_lazy(function: Callable[..., Any]) -> bool:
    """Return whether a call is known to make only a coroutine or generator; see ``check_finished``."""
    while isinstance(function, functools.partial):
        function = function.func
    tests = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    # An object may have such a ``__call__``.
    return any(test(each) for test in tests for each in (function, type(function).__call__))


def check_finished(result: Result, caller: str = "workers") -> Result:
    """Return a result, or raise ``PlanError`` in the name of ``caller`` if it is a coroutine or generator."""
    if inspect.iscoroutine(result):
        # Otherwise Python warns that it was never awaited.
        result.close()
    elif not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return result
    raise PlanError(f"{caller}: {REFUSAL}")


class TokensPerCall(NamedTuple):
    """What a test says of the tokens of each call."""

    input_tokens: PerCall = None
    output_tokens: PerCall = None

    def given(self) -> dict[str, Any]:
        """Return what was given, by the names of the arguments of ``energy``."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def checked(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TokensPerCall:
        """Return the same with plain numbers, or raise ``LLEnergyError`` if they do not fit this call."""
        free: set[str] = set()
        # A name of a function has no signature, nor have some functions in C.
        with suppress(TypeError, ValueError):
            call = functools.partial(function, *args, **kwargs)
            free = set(inspect.signature(call).parameters) - set(call.keywords)
        if taken := sorted(free & self.given().keys()):
            raise LLEnergyError(
                f"energy: {taken[0]} is the tokens of a call, but {_name(function)} has a parameter of that "
                f"name too; bind it first: functools.partial({_name(function)}, {taken[0]}=...)"
            )
        return TokensPerCall(
            **{
                name: value if callable(value) else _whole(value, f"{name} is")
                for name, value in self.given().items()
            }
        )


UNCOUNTED = TokensPerCall()


class TokenCounter:
    """Counts the tokens of calls, each right after it: a result may be a buffer that the next call reuses."""

    def __init__(self, function: Any, per_call: TokensPerCall) -> None:
        self._name = _name(function)
        self._given = per_call.given()
        self._counted: Counter[str] = Counter()

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; each call also counts its tokens if they depend on its result."""
        counts = {name: each for name, each in self._given.items() if callable(each)}
        if not counts:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = function(*args, **kwargs)
            for name, count in counts.items():
                found = count(check_finished(result, "energy"))
                self._counted[name] += _whole(found, f"{name} of {self._name} returned")
            return result

        return call

    def count(self, calls: int) -> Tokens | None:
        """Return the tokens of the latest ``calls``; None if none were given."""
        totals = {
            name: self._counted.pop(name, 0) if callable(each) else each * calls
            for name, each in self._given.items()
        }
        if not totals:
            return None
        return Tokens(input=totals.get("input_tokens", 0), output=totals.get("output_tokens", 0))


def _whole(value: Any, what: str) -> int:
    """Return a whole number from 0 on, such as that of numpy, as an int."""
    with suppress(TypeError):
        number = operator.index(value)
        if number >= 0 and not isinstance(value, bool):
            return number
    raise LLEnergyError(
        f"energy: {what} {reprlib.repr(value)}; give the number of tokens of one call as an integer of at "
        "least 0, or a function of the call's result that returns it"
    )


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))
