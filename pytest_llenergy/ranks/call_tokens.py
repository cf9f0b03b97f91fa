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
            LLEnergyError: A value is no number of tokens, or the function has a parameter of the name.
        """
        numbers = {}
        for name, value in self.given().items():
            with suppress(TypeError, ValueError):
                call = functools.partial(function, *args, **kwargs)
                if name not in call.keywords and name in inspect.signature(call).parameters:
                    raise LLEnergyError(
                        f"energy: {name} is the tokens of a call, but {_name(function)} has a parameter "
                        f"{name} too; bind that one first: functools.partial({_name(function)}, {name}=...)"
                    )
            numbers[name] = value if callable(value) else _whole(value)
            if numbers[name] is None:
                raise LLEnergyError(
                    f"energy: {name} is {reprlib.repr(value)}; give the number of tokens of one call as an "
                    "integer of at least 0, or a function of the call's result that returns it"
                )
        return TokensPerCall(**numbers)


UNCOUNTED = TokensPerCall()


class TokenCounter:
    """Counts the tokens of calls, each right after it: a result may be a buffer that the next call reuses."""

    def __init__(self, function: Any, per_call: TokensPerCall) -> None:
        self._name = _name(function)
        given = per_call.given()
        self._numbers = {name: each for name, each in given.items() if not callable(each)}
        self._functions = {name: each for name, each in given.items() if callable(each)}
        self._counted = dict.fromkeys(self._functions, 0)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; each call also counts its tokens if they depend on its result.

        Raises, from the call:
            LLEnergyError: The test's function returned no number of tokens.
            PlanError: The call only makes a coroutine or generator.
        """
        if not self._functions:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = function(*args, **kwargs)
            for name, count in self._functions.items():
                found = count(check_finished(result, "energy"))
                number = _whole(found)
                if number is None:
                    raise LLEnergyError(
                        f"energy: {name} of {self._name} returned {reprlib.repr(found)}; it must return the "
                        "number of tokens of a call as an integer of at least 0"
                    )
                self._counted[name] += number
            return result

        return call

    def count(self, calls: int) -> Tokens | None:
        """Return the tokens of the latest ``calls``; None if none were given."""
        counted, self._counted = self._counted, dict.fromkeys(self._functions, 0)
        totals = counted | {name: number * calls for name, number in self._numbers.items()}
        if not totals:
            return None
        return Tokens(input=totals.get("input_tokens", 0), output=totals.get("output_tokens", 0))


def _whole(value: Any) -> int | None:
    """Return a whole number from 0 on, such as that of numpy, as an int; None for anything else."""
    with suppress(TypeError):
        number = operator.index(value)
        return number if number >= 0 and not isinstance(value, bool) else None
    return None


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "__qualname__", type(function).__name__)
    return function if isinstance(function, str) else str(named)
