# SPDX-License-Identifier: Apache-2.0
"""Assisted generation: the tokens are those of the model alone, and each is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.errors import BackendError, ModelError

from .loaded_ranks import TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]

#: A repetitive prompt, so that continuations can be looked up in it.
PROMPT = ["abc abc abc abc"]

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
    """The model drafts for itself: right whenever its confidence suffices."""
    with LoadedRanks(assistant=TINY, dtype="float32") as ranks:
        yield ranks


def times(generation: Generation) -> list[int]:
    """Return the timestamps of the tokens."""
    (request,) = generation.requests
    return list(request.token_ns)


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
    with LoadedRanks(assistant=save_a_model(tmp_path / "small", 259), dtype="float32") as ranks:
        assert ranks.info.options["assistant"] == "small"
        assert ranks.generate(PROMPT, max_new_tokens=24)[0].token_ids == alone.token_ids


def test_prompt_lookup_gives_the_same_tokens(alone: Generation) -> None:
    with LoadedRanks(prompt_lookup_num_tokens=4, dtype="float32") as ranks:
        actual = ranks.info.options
        assert (actual["prompt_lookup_num_tokens"], actual["max_matching_ngram_size"]) == (4, 2)
        generation, _ = ranks.generate(PROMPT, max_new_tokens=24)
        ended, _ = ranks.generate(PROMPT, max_new_tokens=24, stop_token_ids=[alone.token_ids[0][9]])
    assert generation.token_ids == alone.token_ids
    assert len(set(times(generation))) < generation.output_tokens == 24
    stop = alone.token_ids[0].index(alone.token_ids[0][9])
    assert ended.token_ids == [alone.token_ids[0][: stop + 1]]


def test_an_end_token_among_drafted_tokens_ends_the_sequence(alone: Generation, same: LoadedRanks) -> None:
    (ids,) = alone.token_ids
    stop = ids[9]
    generation, _ = same.generate(PROMPT, max_new_tokens=24, stop_token_ids=[stop])
    assert generation.token_ids == [ids[: ids.index(stop) + 1]]
    assert len(times(generation)) == generation.output_tokens == ids.index(stop) + 1 < 24


def test_drafting_options_are_recorded(same: LoadedRanks) -> None:
    actual = {name: same.info.options[name] for name in same.info.options if "assistant" in name}
    assert actual == {
        "assistant": "random:llama-tiny",
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    }


@pytest.mark.slow
def test_an_assistant_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    message = (
        "transformers: assistant other has a vocabulary of 100 tokens and the model one of 259; name a model "
        "with the same tokenizer"
    )
    other = save_a_model(tmp_path / "other", 100)
    with pytest.raises(BackendError, match=message):
        LoadedRanks(assistant=other, dtype="float32")


@pytest.mark.slow
def test_a_missing_assistant_gives_a_one_line_error() -> None:
    message = r"model '\./nowhere': no such file or directory, and not a hub id"
    with pytest.raises(ModelError, match=message):
        LoadedRanks(assistant="./nowhere", dtype="float32")


def test_assisted_generation_refuses_a_batch(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        def test_it(backend):
            backend.with_options(prompt_lookup_num_tokens=3).generate(["a", "b"])
        """
    )
    result = quick.runpytest("--energy-model=random:llama-tiny", "--energy-backend=transformers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["BackendError: transformers: assisted generation takes one prompt at a time, not 2; *"]
    )
