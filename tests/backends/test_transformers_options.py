# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers that conflict with a call."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llenergy.errors import BackendError

from .loaded_ranks import LoadedRanks


@pytest.mark.parametrize(
    ("params", "prompts", "message"),
    [
        ({}, ["a", "b"], "assisted generate is only supported for batch_size = 1"),
        ({"cache": "static"}, ["a"], "assisted generate is not supported with Static cache"),
    ],
)
def test_what_the_library_refuses_late_is_one_line(
    params: dict[str, Any], prompts: list[str], message: str
) -> None:
    with (
        LoadedRanks(dtype="float32", prompt_lookup_num_tokens=3) as ranks,
        pytest.raises(
            BackendError,
            match=f"cannot generate with [^\n]*=3: {message}[^\n]*$",
        ),
    ):
        ranks.generate(prompts, **params)
