# SPDX-License-Identifier: Apache-2.0
"""Prompts that a tokenizer cuts are refused, and no others."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from pytest_llenergy.backends.batches import encode_prompts
from pytest_llenergy.errors import BackendError

BOS = 1


def encode(text: str) -> list[int]:
    """Tokens of up to eight characters, which begin at spaces, after a token of its own."""
    words = [f" {word}" for word in text.split(" ")] if text else []
    pieces = [word[at : at + 8] for word in words for at in range(0, len(word), 8)]
    return [BOS, *(zlib.crc32(piece.encode()) for piece in pieces)]


def limited(to: int) -> Callable[[str], list[int]]:
    return lambda text: encode(text)[:to]


def until_nul(text: str) -> list[int]:
    return encode(text.partition("\0")[0])


WORDS = " ".join(f"word{number}" for number in range(300))


@pytest.mark.parametrize(
    ("cutting", "prompt", "message"),
    [
        (limited(200), WORDS, r"keeps 200 of the \d+ tokens of a prompt: no room for it; shorten it"),
        (limited(len(encode(WORDS)) - 1), WORDS, r"keeps \d+ of the \d+ tokens"),
        (until_nul, "one two\0three four", r"keeps 3 of the 6 tokens of a prompt: a NUL, at which it ends"),
        (until_nul, "one\0one", r"keeps 2 of the 4 tokens"),
        (until_nul, "one\0", r"keeps 2 of the 3 tokens"),
        (lambda _: [], "one", "a prompt has no tokens; leave empty prompts out"),
    ],
)
def test_a_prompt_that_is_cut_is_refused(
    cutting: Callable[[str], list[int]], prompt: str, message: str
) -> None:
    with pytest.raises(BackendError, match=f"^mine: (its tokenizer )?{message}"):
        encode_prompts("mine", cutting, ["short", prompt])


@pytest.mark.parametrize("prompt", ["one", WORDS, "one\0", "one\0two", "a" * 9000, " " * 9000, "a " * 5000])
def test_a_whole_prompt_is_not(prompt: str) -> None:
    assert encode_prompts("mine", encode, [prompt]) == [encode(prompt)]
