# SPDX-License-Identifier: Apache-2.0
"""Sets of prompts: slices never shrink silently, and only equal ones have equal digests."""

from __future__ import annotations

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.plugin.default_prompts import DEFAULT_PROMPTS, Prompts
from pytest_llenergy.record.outputs import digest_prompts


def test_a_slice_within_the_set_holds_its_prompts() -> None:
    prompts = Prompts(("a", "b", "c"))
    assert prompts[1] == "b"
    assert prompts[:3] == ("a", "b", "c")
    assert prompts[:] == prompts
    assert prompts[-2:] == ("b", "c")
    assert isinstance(prompts[:2], Prompts)


@pytest.mark.parametrize("start", [None, 2])
def test_a_slice_larger_than_the_set_is_an_error(start: int | None) -> None:
    with pytest.raises(LLEnergyError) as caught:
        Prompts(("a", "b", "c"))[start:4]
    assert str(caught.value) == (
        "prompts[:4]: the set has 3 prompts; define a fixture prompts that returns more"
    )


def test_a_slice_of_a_slice_is_checked_too() -> None:
    with pytest.raises(LLEnergyError, match="the set has 2 prompts"):
        Prompts(("a", "b", "c"))[:2][:3]


def test_the_default_set_has_no_duplicates() -> None:
    assert len(set(DEFAULT_PROMPTS)) == len(DEFAULT_PROMPTS) >= 8


def test_only_equal_prompts_have_equal_digests() -> None:
    digest = digest_prompts(["Name three rivers.", "And a lake."])
    assert digest == digest_prompts(Prompts(("Name three rivers.", "And a lake.")))
    others = (
        ["Name three rivers.And a lake."],
        ["And a lake.", "Name three rivers."],
        ["Name three rivers."],
    )
    assert digest not in {digest_prompts(each) for each in others}
    # printf '["a"]' | sha256sum
    assert digest_prompts(["a"]) == "0eb5b8d6f81bc677"
