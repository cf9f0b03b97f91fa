# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the requested degree runs, shards are counted, and results match one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.backends.transformers.parallel import load_onto_devices
from pytest_llenergy.errors import BackendError, WorkerError
from pytest_llenergy.record.record import Parallel

from . import disagreeing, rank_functions
from .loaded_ranks import PROMPTS, TINY, LoadedRanks

Read = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def single() -> Iterator[LoadedRanks]:
    with LoadedRanks(dtype="float32") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[LoadedRanks]:
    with LoadedRanks(degrees=Parallel(tensor=2), dtype="float32") as ranks:
        yield ranks


def loaded(ranks: LoadedRanks, function: Callable[..., Any] = rank_functions.held) -> list[Any]:
    """Return what each rank holds."""
    degrees = {"data": ranks.degrees.data, "tensor": ranks.degrees.tensor}
    return ranks.call(function, degrees, TINY)


class TestTwoRanks:
    @pytest.mark.slow
    def test_each_rank_holds_half_of_every_matrix(self, pair: LoadedRanks) -> None:
        """Counted by hand: four heads of 64, two key-value heads, 688 inner features, 259 tokens."""
        first, second = loaded(pair)
        for number, found in enumerate((first, second)):
            layer = {
                name.removeprefix("model.layers.1."): shapes[0]
                for name, shapes in found["shapes"].items()
                if name.startswith("model.layers.1.")
            }
            assert layer == {
                "self_attn.q_proj.weight": (128, 256),
                "self_attn.k_proj.weight": (64, 256),
                "self_attn.v_proj.weight": (64, 256),
                "self_attn.o_proj.weight": (256, 128),
                "mlp.gate_proj.weight": (344, 256),
                "mlp.up_proj.weight": (344, 256),
                "mlp.down_proj.weight": (256, 344),
                "input_layernorm.weight": (256,),
                "post_attention_layernorm.weight": (256,),
            }
            assert found["shapes"]["lm_head.weight"] == ((130 - number, 256), (259, 256))

    def test_the_parameters_of_a_rank_are_recorded(self, single: LoadedRanks, pair: LoadedRanks) -> None:
        """Norms are not split: 2 * 256 in each layer, 256 after the last."""
        norms, whole = 2 * 2 * 256 + 256, 1_583_872
        halves = [(whole - norms + extra * 2 * 256) // 2 + norms for extra in (1, -1)]
        found = [each["options"] for each in loaded(pair)]
        assert [each["parameters_of_rank"] for each in found] == halves
        assert {each["parameters"] for each in found} == {whole}
        assert pair.info.options["parameters_of_rank"] == halves[0]
        assert "parameters_of_rank" not in single.info.options

    def test_greedy_tokens_match_one_process(self, single: LoadedRanks, pair: LoadedRanks) -> None:
        alone, _ = single.generate(PROMPTS, max_new_tokens=12)
        together, timeline = pair.generate(PROMPTS, max_new_tokens=12)
        assert together.token_ids == alone.token_ids
        assert len({tuple(ids) for ids in alone.token_ids}) == 3, "equal outputs would prove nothing"
        assert [rank.repeats_others for rank in timeline.ranks] == [False, True]
        assert len(timeline.requests) == 3


class TestRanksThatDisagree:
    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (
                "1,2,3;1,2,3;7,8;7,9",
                "ranks 2 and 3 .* tokens differ",
            ),
            (
                "1,2,3;1,2;7;7",
                "ranks 0 and 1 .* counts of tokens differ",
            ),
        ],
    )
    def test_different_results_within_a_replica_are_an_error(self, ids: str, message: str) -> None:
        with pytest.raises(WorkerError, match=message):
            self.generate(ids)

    def test_different_results_between_replicas_are_accepted(self) -> None:
        assert self.generate("1,2;1,2;7;7").token_ids == [[1, 2], [1, 2], [7]]

    def generate(self, ids: str) -> Generation:
        with LoadedRanks(disagreeing.SPEC, degrees=Parallel(data=2, tensor=2), ids=ids) as ranks:
            return ranks.generate(PROMPTS)[0]


class TestShards:
    """Loads that did not shard as requested are refused."""

    def test_an_unsharded_rank_is_refused(self, single: LoadedRanks) -> None:
        assert single.call(rank_functions.refusal_of_no_shards) == [
            "transformers: tensor=2 was requested, but this rank holds all 12 parameters of Linear unsharded"
        ]


def test_tensor_parallelism_and_placement_are_exclusive() -> None:
    context = RankContext(parallel=Parallel(tensor=2, placement=2))
    with pytest.raises(BackendError, match="either sharded"):
        load_onto_devices(None, "", {}, context, "cpu")
