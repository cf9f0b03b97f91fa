# SPDX-License-Identifier: Apache-2.0
"""Engines that need a GPU, in real ranks, over stand-ins of their public classes.

What is tested is what this package does with those classes; not that the real ones are like them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends import sglang, tensorrt_llm
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel

from .engine import PROMPTS, TINY, Engine, counts

STAND_INS = Path(__file__).parent / "stand_ins"
SPECS = {"sglang": sglang.SPEC, "tensorrt-llm": tensorrt_llm.SPEC}


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        yield


@pytest.fixture(scope="module", params=list(SPECS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(SPECS[request.param], degrees=Parallel(tensor=2)) as made:
        yield made


def test_lengths_are_those_counted_by_hand(engine: Engine) -> None:
    generation, _ = engine.generate(PROMPTS, max_new_tokens=5)
    assert counts(generation) == [(3, 5), (11, 5), (1, 5)]
    assert [len(ids) for ids in generation.token_ids] == [5, 5, 5]
    assert len({tuple(ids) for ids in generation.token_ids}) == 3


def test_a_sequence_that_ends_early_counts_the_token_that_ended_it(engine: Engine) -> None:
    free, _ = engine.generate(PROMPTS)
    stop = free.token_ids[0][2]
    stopped, _ = engine.generate(PROMPTS, stop_token_ids=[stop])
    assert stopped.token_ids[0] == free.token_ids[0][:3]
    assert counts(stopped)[0] == (3, 3)


def test_the_engines_processes_are_counted_and_are_its_own(engine: Engine) -> None:
    (rank,) = engine.group.ranks
    assert len(set(rank.workers)) == 2
    assert rank.pid not in rank.workers
    assert {psutil.Process(pid).ppid() for pid in rank.workers} == {rank.pid}


def test_what_was_told_is_recorded(engine: Engine) -> None:
    assert engine.info.version.endswith("stand-in")
    assert engine.info.model == TINY
    assert False in (engine.info.options.get("radix_cache"), engine.info.options.get("block_reuse"))


def test_memory_of_boards_that_the_rank_cannot_see_has_no_value(engine: Engine) -> None:
    workload = engine.prepare(["abc"], GenerationParams(max_new_tokens=2, ignore_eos=True))
    workload.run_round()
    assert workload.peak_memory_bytes is None


def test_stamps_are_there_where_the_engine_tells_and_nowhere_else(engine: Engine) -> None:
    _, timeline = engine.generate(PROMPTS, max_new_tokens=3)
    if engine.info.name == "sglang":
        assert timeline.borders_ns == ()
        assert {request.last_token_ns for request in timeline.requests} == {None}
    else:
        ((start_ns, border_ns),) = timeline.borders_ns
        assert start_ns < border_ns < timeline.end_ns
        assert all((r.first_token_ns or 0) < (r.last_token_ns or 0) for r in timeline.requests)


@pytest.mark.parametrize("name", SPECS)
def test_an_engine_that_caches_all_the_same_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CACHES", "1")
    with Engine(SPECS[name]) as made:
        made.generate(["abc"], max_new_tokens=2)
        with pytest.raises(BackendError, match=r"from its .*cache, .* off; the round has not done the work"):
            made.generate(["abc"], max_new_tokens=2)


@pytest.mark.parametrize("name", SPECS)
def test_an_option_that_the_engine_refuses_is_told_in_one_line(name: str) -> None:
    with pytest.raises(BackendError) as told:
        Engine(SPECS[name], dtype="float3")
    assert str(told.value) == f"{name} refuses to load random:llama-tiny: unknown dtype float3"


def test_replicas_of_sglang_are_its_own_and_those_of_tensorrt_llm_are_ours() -> None:
    degrees = Parallel(data=2, tensor=2)
    with Engine(sglang.SPEC, degrees=degrees) as theirs:
        assert [len(rank.workers) for rank in theirs.group.ranks] == [4]
    with Engine(tensorrt_llm.SPEC, degrees=degrees) as ours:
        assert [len(rank.workers) for rank in ours.group.ranks] == [2, 2]
        assert [rank.device for rank in ours.group.ranks] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_left_of_a_model_that_makes_room_for_another(name: str) -> None:
    with Engine(SPECS[name], degrees=Parallel(pipeline=2)) as made:
        (before,) = made.group.ranks
        made.load(dtype="float16")
        (after,) = made.group.ranks
        assert after.pid == before.pid
        assert set(after.workers).isdisjoint(before.workers)
        assert not any(psutil.pid_exists(pid) for pid in before.workers)


def test_sampling_by_a_seed_needs_what_sglang_does_it_with() -> None:
    with Engine(sglang.SPEC, enable_deterministic_inference=True) as made:
        once, again, other = (
            made.generate(PROMPTS, do_sample=True, seed=seed, max_new_tokens=4)[0].token_ids
            for seed in (1, 1, 5)
        )
    assert once == again != other


def test_without_a_gpu_their_tests_are_skipped_with_the_reason(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.makepyfile("def test_it(backend): pass")
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}")
    result = quick.runpytest_subprocess(
        "-rs", "-p", "no:cacheprovider", "--energy-backend=sglang,tensorrt-llm"
    )
    result.assert_outcomes(skipped=2)
    told = " ".join(result.stdout.str().split())
    assert "sglang does not run on the CPU here (the wheel on PyPI is for CUDA)" in told
    assert "tensorrt-llm does not run on the CPU here (TensorRT-LLM runs on NVIDIA GPUs only)" in told
