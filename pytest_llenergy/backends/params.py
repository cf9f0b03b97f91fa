# SPDX-License-Identifier: Apache-2.0
"""Checked keyword arguments of what a backend is asked to do."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pytest_llenergy.backends.near import did_you_mean
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Primitive

if TYPE_CHECKING:
    from typing_extensions import Self


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to do a task; recorded whole."""

    task: ClassVar[str]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Check keyword arguments. Raises ``BackendError`` naming the unknown and the impossible ones."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            told = f"known: {', '.join(cls.__struct_fields__)}"
            told = "; ".join(filter(None, (told, did_you_mean(unknown, cls.__struct_fields__))))
            raise BackendError(f"{cls.task}: unknown argument {', '.join(unknown)}; {told}")
        try:
            params = msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise BackendError(f"{cls.task}: {cls._refusal(values, str(error))}") from None
        for name, ok, needs in params.bounds():
            if not ok:
                raise BackendError(f"{cls.task}: {name} is {_shown(getattr(params, name))}, needs {needs}")
        return params

    @classmethod
    def _refusal(cls, values: Mapping[str, Any], told: str) -> str:
        """What msgspec says of a value, such as ``Expected `int`, got `str` - at `$.seed```, in our words."""
        what, _, place = told.partition(" - at `$.")
        name = re.split(r"\W", place)[0]
        needs = re.sub(r"Expected `(.*)`, got .*", r"\1", what)
        for field in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
            if field.name == name and isinstance(field.type, msgspec.inspect.LiteralType):
                needs = f"one of {', '.join(map(str, field.type.values))}"
        return f"{name} is {values[name]!r}, needs {needs}"

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        """Of each field that has bounds its name, whether it is within them, and what it needs."""
        yield from ()

    def primitives(self) -> dict[str, Primitive]:
        """As recorded: JSON primitives, the entries of a tuple joined by commas."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _shown(value: object) -> str:
    """In a line: of a long tuple, such as a trace of thousands of requests, how it begins."""
    return reprlib.repr(value) if isinstance(value, tuple) else str(value)
