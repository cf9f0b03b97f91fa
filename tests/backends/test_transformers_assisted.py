# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the tokens are those of the model alone, and each is counted.

Drafted and accepted tokens are compared with a loop written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation

from .loaded_ranks import TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]

#: A repetitive prompt, so that continuations can be looked up in it.
PROMPT = ["abc abc abc abc"]

LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}


@pytest.fixture(scope="module")
def alone() -> Iterator[Generation]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks.generate(PROMPT, max_new_tokens=24)[0]


def times(generation: Generation) -> list[int]:
    """Return the timestamps of the tokens."""
    (request,) = generation.requests
    return list(request.token_ns)


def look_up_by_hand(prompt: list[int], continuation: list[int], num_tokens: int) -> tuple[int, int]:
    """Return drafted and accepted tokens: the draft is what followed the last two tokens, or else the last
    one, where they occurred first.
    """
    tokens = list(prompt)
    drafted = accepted = done = 0
    while done < len(continuation):
        left = continuation[done:]
        found = (
            tokens[at + size : at + size + num_tokens]
            for size in (2, 1)
            for at in range(len(tokens) - size)
            if tokens[at : at + size] == tokens[-size:]
        )
        draft = next(found, []) if len(left) > 1 else []
        right = next((n for n, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b), len(draft))
        right = min(right, len(left) - 1)
        drafted += len(draft)
        accepted += right
        tokens += left[: right + 1]
        done += right + 1
    return drafted, accepted


def test_without_assistance_each_token_has_its_own_step(alone: Generation) -> None:
    assert len(set(times(alone))) == len(times(alone)) == 24


def test_prompt_lookup_gives_the_same_tokens(alone: Generation) -> None:
    with LoadedRanks(**LOOKUP, dtype="float32") as ranks:
        actual = ranks.info.options
        assert (actual["prompt_lookup_num_tokens"], actual["max_matching_ngram_size"]) == ("4", "2")
        generation, _ = ranks.generate(PROMPT, max_new_tokens=24)
        ended, _ = ranks.generate(PROMPT, max_new_tokens=24, stop_token_ids=[alone.token_ids[0][9]])
    assert generation.token_ids == alone.token_ids
    assert len(set(times(generation))) < generation.output_tokens == 24
    (request,) = generation.requests
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained_path(resolve_model(TINY)))
    drafted, accepted = look_up_by_hand(
        tokenizer(PROMPT[0])["input_ids"], alone.token_ids[0], LOOKUP["prompt_lookup_num_tokens"]
    )
    assert (request.drafted_tokens, request.accepted_tokens) == (drafted, accepted)
    assert 0 < accepted < drafted
    stop = alone.token_ids[0].index(alone.token_ids[0][9])
    assert ended.token_ids == [alone.token_ids[0][: stop + 1]]
