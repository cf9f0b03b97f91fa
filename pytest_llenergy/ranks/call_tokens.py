# SPDX-License-Identifier: Apache-2.0
"""Tokens of a test's own function: a number for each call, or a function of the call's result."""

from __future__ import annotations

import functools
import inspect
import operator
import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.ranks.pickling import check_finished
from pytest_llenergy.record.record import Tokens

#: The tokens of one call; None if the test does not say.
PerCall = int | Callable[[Any], int] | None


class TokensPerCall(NamedTuple):
    """What a test says of the tokens of each call."""

    input_tokens: PerCall = None
    output_tokens: PerCall = None

    def given(self) -> dict[str, Any]:
        """Return what was given, by the names of the arguments of ``energy``."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def checked(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TokensPerCall:
        """Return the same with plain numbers, for a call that these arguments make.

        Raises:
            LLEnergyError: A number is none, or the function has a parameter of the same name.
        """
        numbers = {}
        for name, value in self.given().items():
            if _leaves_open(function, args, kwargs, name):
                raise LLEnergyError(
                    f"energy: {name} is the tokens of a call, but {_name(function)} has a parameter {name} "
                    f"too; bind that one first: functools.partial({_name(function)}, {name}=...)"
                )
            numbers[name] = value if callable(value) else _whole(value)
            if numbers[name] is None:
                raise LLEnergyError(
                    f"energy: {name} is {reprlib.repr(value)}, needs the tokens of one call: a whole number, "
                    "0 or more, or a function of the call's result that returns one"
                )
        return TokensPerCall(**numbers)


UNCOUNTED = TokensPerCall()


class TokenCounter:
    """Counts the tokens of the calls of a round, after it: counting is no part of the measured work."""

    def __init__(self, function: Any, per_call: TokensPerCall) -> None:
        self._name = _name(function)
        self._per_call = per_call.given()
        self._results: list[Any] = []

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; each call keeps its result for ``count`` if the tokens depend on it."""
        if not any(map(callable, self._per_call.values())):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = function(*args, **kwargs)
            self._results.append(result)
            return result

        return call

    def count(self, calls: int) -> Tokens | None:
        """Return the tokens of the latest ``calls``, and let go of their results; None if none were given.

        Raises:
            LLEnergyError: The test's function returned no number of tokens.
            PlanError: The call only makes a coroutine or generator.
        """
        __tracebackhide__ = True
        results, self._results = self._results, []
        totals = {"input_tokens": 0, "output_tokens": 0}
        for name, per_call in self._per_call.items():
            if not callable(per_call):
                totals[name] = per_call * calls
                continue
            for result in results:
                found = per_call(check_finished(result, "energy"))
                number = _whole(found)
                if number is None:
                    raise LLEnergyError(
                        f"energy: {name} of {self._name} returned {reprlib.repr(found)}, needs the tokens of "
                        "the call whose result it gets: a whole number, 0 or more"
                    )
                totals[name] += number
        if not self._per_call:
            return None
        return Tokens(input=totals["input_tokens"], output=totals["output_tokens"])


def _whole(value: Any) -> int | None:
    """Return a whole number from 0 on, such as that of numpy, as an int; None for anything else."""
    with suppress(TypeError):
        number = operator.index(value)
        return number if number >= 0 and not isinstance(value, bool) else None
    return None


def _leaves_open(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> bool:
    """Return whether a function has a parameter of a name, which a call with these arguments leaves open."""
    with suppress(TypeError, ValueError):
        call = functools.partial(function, *args, **kwargs)
        return name not in call.keywords and name in inspect.signature(call).parameters
    return False


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return (
        function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
    )
