# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the tokens are those of the model alone, and each is counted.

Drafted and accepted tokens are compared with a loop written by hand.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation

from .loaded_ranks import TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]

#: A repetitive prompt, so that continuations can be looked up in it.
PROMPT = ["abc abc abc abc"]

LOOKUP: dict[str, Any] = {"method": "prompt_lookup", "num_tokens": 4}

#: Saves a random model of a given shape with its own weights.
SAVES_A_MODEL = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
config = LlamaConfig(vocab_size=int(sys.argv[2]), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=1, num_key_value_heads=1, pad_token_id=0)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


def save_a_model(directory: Path, vocabulary: int) -> str:
    subprocess.run([sys.executable, "-c", SAVES_A_MODEL, str(directory), str(vocabulary)], check=True)
    return str(directory)


@pytest.fixture(scope="module")
def alone() -> Iterator[Generation]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks.generate(PROMPT, max_new_tokens=24)[0]


@pytest.fixture(scope="module")
def same() -> Iterator[LoadedRanks]:
    """The model drafts for itself, and is always right."""
    with LoadedRanks(speculative={"model": TINY, "num_tokens": 5}, dtype="float32") as ranks:
        yield ranks


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


def test_tokens_of_an_assistant_are_counted_rather_than_its_calls(
    alone: Generation, same: LoadedRanks
) -> None:
    generation, timeline = same.generate(PROMPT, max_new_tokens=24)
    assert generation.token_ids == alone.token_ids
    assert len(times(generation)) == generation.output_tokens == 24
    assert len(set(times(generation))) < 24, "no step has given several tokens"
    assert timeline.start_ns < times(generation)[0] <= times(generation)[-1] <= timeline.end_ns


@pytest.mark.slow
def test_a_bad_assistant_does_not_change_the_tokens(alone: Generation, tmp_path: Path) -> None:
    draft = {"model": save_a_model(tmp_path / "small", 259), "num_tokens": 4}
    with LoadedRanks(speculative=draft, dtype="float32") as ranks:
        assert ranks.info.options["draft_model"] == "small"
        generation, timeline = ranks.generate(PROMPT, max_new_tokens=24)
        assert generation.token_ids == alone.token_ids
        (request,) = timeline.requests
        assert (request.accepted_tokens or 0) < (request.drafted_tokens or 0) / 2


def test_prompt_lookup_gives_the_same_tokens(alone: Generation) -> None:
    with LoadedRanks(speculative=LOOKUP, dtype="float32") as ranks:
        actual = ranks.info.options
        assert (actual["prompt_lookup_num_tokens"], actual["max_matching_ngram_size"]) == (4, 2)
        generation, _ = ranks.generate(PROMPT, max_new_tokens=24)
        ended, _ = ranks.generate(PROMPT, max_new_tokens=24, stop_token_ids=[alone.token_ids[0][9]])
    assert generation.token_ids == alone.token_ids
    assert len(set(times(generation))) < generation.output_tokens == 24
    (request,) = generation.requests
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained_path(resolve_model(TINY)))
    drafted, accepted = look_up_by_hand(
        tokenizer(PROMPT[0])["input_ids"], alone.token_ids[0], LOOKUP["num_tokens"]
    )
    assert (request.drafted_tokens, request.accepted_tokens) == (drafted, accepted)
    assert 0 < accepted < drafted
    stop = alone.token_ids[0].index(alone.token_ids[0][9])
    assert ended.token_ids == [alone.token_ids[0][: stop + 1]]


def test_all_drafts_of_the_model_itself_are_accepted(alone: Generation, same: LoadedRanks) -> None:
    """Twenty-four tokens are four steps of five drafted tokens and one more each."""
    generation, timeline = same.generate(PROMPT, max_new_tokens=24)
    assert generation.token_ids == alone.token_ids
    (request,) = timeline.requests
    assert (request.drafted_tokens, request.accepted_tokens, request.output_tokens) == (20, 20, 24)
    assert len(set(times(generation))) == 4


def test_an_end_token_among_drafted_tokens_ends_the_sequence(alone: Generation, same: LoadedRanks) -> None:
    (ids,) = alone.token_ids
    stop = ids[9]
    generation, _ = same.generate(PROMPT, max_new_tokens=24, stop_token_ids=[stop])
    assert generation.token_ids == [ids[: ids.index(stop) + 1]]
    assert len(times(generation)) == generation.output_tokens == ids.index(stop) + 1 < 24


@pytest.mark.slow
def test_drafting_options_are_recorded(same: LoadedRanks) -> None:
    actual = {name: same.info.options[name] for name in same.info.options if "assistant" in name}
    assert actual == {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    assert same.info.options["draft_model"] == "random:llama-tiny"
