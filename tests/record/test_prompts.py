# SPDX-License-Identifier: Apache-2.0
"""Sets of prompts: slices never shrink silently, and a file that holds none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.prompts import (
    DEFAULT_PROMPTS,
    Prompts,
    default_prompts,
    digest_prompts,
    load_prompts,
)


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
        "prompts[:4]: the set has 3 prompts; name a larger set with the ini key energy_prompts, or override "
        "the prompts fixture"
    )


def test_a_slice_of_a_slice_is_checked_too() -> None:
    with pytest.raises(LLEnergyError, match="the set has 2 prompts"):
        Prompts(("a", "b", "c"))[:2][:3]


def test_the_default_set_has_no_duplicates() -> None:
    assert default_prompts() == DEFAULT_PROMPTS
    assert len(set(DEFAULT_PROMPTS)) == len(DEFAULT_PROMPTS) >= 8


def test_a_file_holds_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("# a comment\nWas kostet's?\n\n  Größe: 3 µm  \nhash # inside\n", encoding="utf-8")
    assert load_prompts(path) == ("Was kostet's?", "Größe: 3 µm", "hash # inside")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.txt"
    with pytest.raises(LLEnergyError, match=rf"^the prompts file {missing} cannot be read: No such file"):
        load_prompts(missing)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LLEnergyError, match=rf"^the prompts file {binary} is not UTF-8 text \('utf-8' codec"):
        load_prompts(binary)


@pytest.mark.parametrize("text", ["", "\n \n", "# only\n# comments\n"])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(
        LLEnergyError, match=rf"^the prompts file {path} holds no prompt; write one per line$"
    ):
        load_prompts(path)


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
