# SPDX-License-Identifier: Apache-2.0
"""Every argument of the public functions, with values of other types: one line that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.traffic import Request, dataset, synthetic
from pytest_llenergy.backends.traffic.requests import check_inputs
from pytest_llenergy.errors import LLEnergyError

VALUES = {
    "text": "3",
    "none": None,
    "list": [1],
    "true": True,
    "nan": math.nan,
    "infinite": math.inf,
    "huge": 10**400,
    "bytes": b"x",
}


def request(**arguments: Any) -> None:
    check_inputs("serve", [Request(**{"prompt": "x", **arguments})])


def conversation(**arguments: Any) -> None:
    follow_up = Request(**{"prompt": "y", **arguments})
    check_inputs("serve", [Request(prompt="x", follow_ups=(follow_up,))])


def synthetic_requests(**arguments: Any) -> None:
    synthetic(**{"count": 1, "input_tokens": 8, "output_tokens": 8, **arguments})


def rows(**arguments: Any) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "timestamp": 0}\n')
    dataset(arguments.pop("source", "rows.jsonl"), **arguments)


def cases() -> Iterator[Any]:
    """Each argument with each value that its annotation does not allow."""
    for call, annotated in (
        (request, Request),
        (conversation, Request),
        (synthetic_requests, synthetic),
        (rows, dataset),
    ):
        parameters: list[Parameter] = list(signature(annotated).parameters.values())
        for parameter in parameters:
            kind = str(parameter.annotation)
            for label, value in VALUES.items():
                allowed = (label == "text" and "str" in kind and "tuple" not in kind) or (
                    label == "none" and "None" in kind
                )
                if not allowed:
                    yield pytest.param(
                        call, parameter.name, value, id=f"{call.__name__}-{parameter.name}-{label}"
                    )


@pytest.mark.parametrize(("call", "name", "value"), list(cases()))
def test_an_argument_of_another_type_is_one_line(
    call: Callable[..., None], name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LLEnergyError) as caught:
        call(**{name: value})
    message = str(caught.value)
    assert name in message
    assert len(message) < 200
    assert "\n" not in message
