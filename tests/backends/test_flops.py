# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations: counted by torch, worked out from a shape, and by hand, which all agree.

The random model has one token a byte and adds none, so the length of an ASCII prompt is its token count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llenergy.backends import openvino
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.flops import (
    DecoderShape,
    estimate_flops_from_file,
    estimate_generation_flops,
    shape_from_config,
    shape_from_source,
    transformers_job_flops,
)
from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import ModelError
from pytest_llenergy.record.timeline import Flops, RequestTimeline

from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

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
    with LoadedRanks(dtype="float32", attention="eager") as ranks:
        yield ranks


@pytest.fixture
def sdpa() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks


def tiny_config() -> dict[str, Any]:
    actual: dict[str, Any] = json.loads(
        (Path(pretrained_path(resolve_model(TINY))) / "config.json").read_text()
    )
    return actual


def shape() -> DecoderShape:
    return shape_from_config(tiny_config())


def made(*lengths: tuple[int, int]) -> Generation:
    requests = [RequestTimeline(input_tokens=prompt, output_tokens=new) for prompt, new in lengths]
    return Generation(texts=[], token_ids=[], requests=requests)


@pytest.mark.slow
def test_torch_counts_with_eager_attention_match_hand_counts(eager: LoadedRanks) -> None:
    actual, _ = flops(eager, ["hello world"], max_new_tokens=3)
    assert actual == Flops(count=OF_ELEVEN, source="counted by torch.utils.flop_counter, eager")


def test_the_formula_matches_hand_counts() -> None:
    actual = estimate_generation_flops(shape(), made((11, 3)), padded=True)
    assert actual.count == OF_ELEVEN
    assert actual.shared
    assert str(actual.source).startswith("analytic: ")


def test_attention_of_sdpa_on_the_cpu_is_counted(sdpa: LoadedRanks) -> None:
    actual, _ = flops(sdpa, ["hello world"], max_new_tokens=3)
    assert actual.count == OF_ELEVEN
    source = "counted by torch.utils.flop_counter, sdpa, on CPUs from the shapes of its calls"
    assert actual.source == source


def test_padding_is_counted(eager: LoadedRanks) -> None:
    """Prompts of 3, 11 and 1 tokens cost as much as three of 11."""
    actual, _ = flops(eager, PROMPTS, max_new_tokens=3)
    assert actual.count == 3 * OF_ELEVEN
    assert (
        estimate_generation_flops(shape(), made((3, 3), (11, 3), (1, 3)), padded=True).count == 3 * OF_ELEVEN
    )
    assert estimate_generation_flops(shape(), made((3, 3), (11, 3), (1, 3)), padded=False).count == (
        shape().flop(3, 3) + OF_ELEVEN + shape().flop(1, 3)
    )


def test_a_sequence_that_ends_early_counts_until_the_last_one_ends(eager: LoadedRanks) -> None:
    _, free = flops(eager, PROMPTS, max_new_tokens=6)
    stop = free.token_ids[0][1]
    actual, ended = flops(eager, PROMPTS, max_new_tokens=6, stop_token_ids=[stop])
    lengths = counts(ended)
    assert min(new for _, new in lengths) < max(new for _, new in lengths)
    assert actual.count == estimate_generation_flops(shape(), made(*lengths), padded=True).count


def test_the_empty_part_of_a_static_cache_is_counted(eager: LoadedRanks) -> None:
    """The cache holds all tokens but the last, which no later step attends to."""
    actual, _ = flops(eager, ["hello world"], max_new_tokens=3, cache="static")
    assert actual.count == 13 * A_TOKEN + 3 * VOCABULARY + attention(11, 13) + 2 * attention(1, 13)


class Unseen:
    """A model as far as it decides how operations are counted; it need not run."""

    def __init__(self, attention: str, **config: Any) -> None:
        actual = tiny_config()
        self.config = SimpleNamespace(_attn_implementation=attention, to_dict=lambda: {**actual, **config})

    def forward(self) -> None:
        """Do nothing."""


def test_attention_that_torch_does_not_count_is_estimated() -> None:
    actual = transformers_job_flops(Unseen("flash_attention_2"), None, made((11, 3)), tensor=1)
    assert (actual.count, actual.shared) == (OF_ELEVEN, True)
    assert str(actual.source).endswith("(the counter does not see attention of flash_attention_2)")


def test_operations_of_shards_are_estimated_once_for_all_ranks() -> None:
    actual = transformers_job_flops(Unseen("sdpa"), None, made((11, 3)), tensor=2)
    assert (actual.count, actual.shared) == (OF_ELEVEN, True)


def test_operations_that_cannot_be_counted_or_estimated_are_unknown() -> None:
    actual = transformers_job_flops(Unseen("sdpa", model_type="falcon"), None, made((11, 3)), tensor=2)
    assert actual == Flops.unknown(
        "torch.utils.flop_counter does not see how a product is sharded over ranks, and "
        "model_type falcon is no dense decoder with full attention of llama, mistral, qwen2, qwen3"
    )


class TestShapes:
    def test_the_shape_is_read_from_a_gguf_file(self) -> None:
        """The shape of SmolLM2-135M as its authors describe it."""
        assert shape_from_source(resolve_model(None)) == DecoderShape(30, 576, 9, 3, 64, 1536, 49152)

    def test_a_damaged_gguf_file_gives_a_one_line_error(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF nothing")
        actual = estimate_flops_from_file(
            ModelSource("gguf", str(tmp_path / "m.gguf")), made((1, 1)), padded=False
        )
        assert actual.count is None
        assert str(actual.reason).startswith("model m.gguf: a damaged GGUF file (")

    @pytest.mark.parametrize(
        "change",
        [{"model_type": "gpt2"}, {"num_local_experts": 8}, {"sliding_window": 14}, {"head_dim": [1]}],
    )
    def test_models_other_than_dense_decoders_are_refused(
        self, change: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError) as error:
            shape_from_config({**tiny_config(), **change})
        assert "\n" not in str(error.value)
        assert (
            shape_from_config({**tiny_config(), "sliding_window": 14, "use_sliding_window": False}) == shape()
        )
        source = ModelSource("directory", str(tmp_path))
        (tmp_path / "config.json").write_text("{")
        assert estimate_flops_from_file(source, made((1, 1)), padded=False).count is None


@pytest.mark.slow
def test_openvino_operations_exclude_padding() -> None:
    with LoadedRanks(openvino.SPEC, model=None) as ranks:
        actual, generation = flops(ranks, ["Hello", "The capital of France is"], max_new_tokens=4)
    lengths = [each.input_tokens for each in generation.requests]
    assert len(set(lengths)) == 2
    smollm = shape_from_source(resolve_model(None))
    assert actual.count == sum(smollm.flop(length, 4) for length in lengths)
