# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks: the batch is split like accelerate splits it, and accelerate sees every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.record.record import Parallel

from .loaded_ranks import LoadedRanks

PROMPTS = ["abc", "hello world", "x", "to be or not", "one", "seventeen apples", "?"]


@pytest.fixture(scope="module")
def pair() -> Iterator[LoadedRanks]:
    with LoadedRanks(degrees=Parallel(data=2), dtype="float32") as ranks:
        yield ranks


def test_seven_prompts_on_two_ranks_keep_their_order_and_lengths(pair: LoadedRanks) -> None:
    together, timeline = pair.generate(PROMPTS, max_new_tokens=12)
    assert [len(rank.requests) for rank in timeline.ranks] == [4, 3]
    assert [request.input_tokens for request in timeline.requests] == [len(prompt) for prompt in PROMPTS]
    assert [request.output_tokens for request in timeline.requests] == [12] * 7
    backwards, _ = pair.generate(PROMPTS[::-1], max_new_tokens=12)
    assert together.token_ids == backwards.token_ids[::-1]
    assert len({tuple(ids) for ids in together.token_ids}) == 7, "equal outputs would prove nothing"


USES_ACCELERATE = """
import pytest

def share(prompts, **keywords):
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(**keywords)
    with state.split_between_processes(prompts) as mine:
        done = [f"{state.process_index}:{prompt}" for prompt in mine]
    return state.num_processes, gather_object(done)
"""


def test_accelerate_seeing_one_process_in_a_world_of_two_fails(quick: pytest.Pytester) -> None:
    """Both ranks would do all of the work, and the energy of both would be attributed to one batch."""
    quick.makepyfile(
        USES_ACCELERATE
        + """
@pytest.mark.gpus(2, fallback="cpu")
def test_it(energy, workers):
    energy(workers.call(share, ["a", "b"]))
"""
    )
    result = quick.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*PlanError: rank ? of 2 *: accelerate sees 1 process in a world of 2 ranks, so each has done *"]
    )


def convert_on_rank_1(cache: str) -> list[str]:
    """Build the model on rank 1 alone, in an empty cache. Returns the names of its files there."""
    import os
    from pathlib import Path

    import torch.distributed as dist

    from pytest_llenergy.backends.convert import pretrained_path
    from pytest_llenergy.backends.models import resolve_model

    os.environ["LLENERGY_CACHE_DIR"] = cache
    if dist.get_rank() != 1:
        return []
    return sorted(file.name for file in Path(pretrained_path(resolve_model("random:llama-tiny"))).iterdir())


def test_a_model_converted_by_another_rank_than_0_has_its_weights(pair: LoadedRanks, tmp_path: Path) -> None:
    _, files = pair.call(convert_on_rank_1, str(tmp_path))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
