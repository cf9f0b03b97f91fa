# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations: counted by torch and by hand, which agree.

The random model has one token a byte and adds none, so the length of an ASCII prompt is its token count.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.backends.transformers.flops import count_flops
from pytest_llenergy.record.timeline import Flops

from .loaded_ranks import PROMPTS, LoadedRanks, counts

# random:llama-tiny, by its config.json: 2 layers of width 256, 4 heads of 64, 2 key-value heads, 688 in the
# feed-forward layer, 259 tokens. A product of m×k and k×n takes 2·m·k·n operations.
QUERY = 2 * 256 * (4 * 64)
KEY_AND_VALUE = 2 * (2 * 256 * (2 * 64))
OUTPUT = 2 * (4 * 64) * 256
GATE_UP_DOWN = 3 * (2 * 256 * 688)
A_TOKEN = 2 * (QUERY + KEY_AND_VALUE + OUTPUT + GATE_UP_DOWN)
VOCABULARY = 2 * 256 * 259


def attention(queries: int, keys: int) -> int:
    """Operations of scores and weighted values: 4 heads of 64, in 2 layers."""
    return 2 * 4 * (2 * queries * 64 * keys + 2 * queries * keys * 64)


#: A prompt of 11 and 3 new tokens: a prefill of 11, of which one position asks for a token, then two steps.
OF_ELEVEN = (
    (11 * A_TOKEN + VOCABULARY + attention(11, 11))
    + (A_TOKEN + VOCABULARY + attention(1, 12))
    + (A_TOKEN + VOCABULARY + attention(1, 13))
)


def flops(ranks: LoadedRanks, prompts: list[str], **params: Any) -> tuple[Flops, Generation]:
    """Return the operations of one round, and its result."""
    workload = ranks.prepare(prompts, GenerationParams.parse({"ignore_eos": True, **params}))
    workload.run_round()
    made = Generation.merge(workload.results())
    actual = workload.flops()
    assert Generation.merge(workload.results()) == made, "counting must not change what was made"
    return actual, made


@pytest.fixture(scope="module")
def eager() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32", attn_implementation="eager") as ranks:
        yield ranks


@pytest.fixture
def sdpa() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks


def test_attention_of_sdpa_on_the_cpu_is_counted(sdpa: LoadedRanks) -> None:
    actual, _ = flops(sdpa, ["hello world"], max_new_tokens=3)
    assert actual.count == OF_ELEVEN
    source = "counted by torch.utils.flop_counter, sdpa, on CPUs from the shapes of its calls"
    assert actual.source == source


def test_a_sequence_that_ends_early_counts_until_the_last_one_ends(eager: LoadedRanks) -> None:
    _, free = flops(eager, PROMPTS, max_new_tokens=6)
    stop = free.token_ids[0][1]
    actual, ended = flops(eager, PROMPTS, max_new_tokens=6, stop_token_ids=[stop])
    lengths = counts(ended)
    assert min(new for _, new in lengths) < max(new for _, new in lengths) == 6
    longer, _ = flops(eager, PROMPTS, max_new_tokens=6)
    assert actual == longer


def test_the_empty_part_of_a_static_cache_is_counted(eager: LoadedRanks) -> None:
    """The cache holds all tokens but the last, which no later step attends to."""
    actual, _ = flops(eager, ["hello world"], max_new_tokens=3, cache="static")
    assert actual.count == 13 * A_TOKEN + 3 * VOCABULARY + attention(11, 13) + 2 * attention(1, 13)


@pytest.mark.parametrize(
    ("attention", "tensor", "what"),
    [
        ("flash_attention_2", 1, "attention of flash_attention_2"),
        ("sdpa", 2, "how a product is sharded over"),
    ],
)
def test_operations_that_torch_does_not_see_are_unknown(attention: str, tensor: int, what: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention), forward=lambda: None)
    actual = count_flops(model, None, tensor)
    assert actual.count is None
    assert str(actual.reason).startswith(f"torch.utils.flop_counter does not see {what}")
