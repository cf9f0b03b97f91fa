# SPDX-License-Identifier: Apache-2.0
"""Engines that need a GPU, in real ranks, over stand-ins of their public classes.

What is tested is what this package does with those classes; not that the real ones are like them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.model import resolve
from pytest_llenergy.backends.sglang import spec as sglang
from pytest_llenergy.backends.tensorrt_llm import spec as tensorrt_llm
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import task_workload

STAND_INS = Path(__file__).parent / "stand_ins"
PROMPTS = ["abc", "hello world", "x"]
SPECS = {"sglang": sglang.SPEC, "tensorrt-llm": tensorrt_llm.SPEC}


class Engine:
    """One of them in real ranks, on boards that only the plan knows."""

    def __init__(self, spec: BackendSpec, parallel: Parallel, **options: Any) -> None:
        degrees = parallel.data * parallel.tensor * parallel.pipeline
        boards = tuple(f"GPU-{number}" for number in range(degrees))
        plan = plan_processes(spec.capabilities, parallel, Lease(devices=boards), [0, 1], 1)
        self.pool = RankPool(timeout_s=120)
        try:
            load = Load.of(spec, resolve("random:llama-tiny"), options)
            self.group, self.info = self.pool.loaded(plan, load)
        except BaseException:
            # The fixture has nothing yet that it could close.
            self.pool.close()
            raise

    def generate(self, prompts: list[str], **params: Any) -> tuple[Generation, RoundTimeline]:
        workload = task_workload(self.group, prompts, GenerationParams.of(params), 60)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        yield


@pytest.fixture(scope="module", params=list(SPECS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(SPECS[request.param], Parallel(tensor=2))
    yield made
    made.pool.close()


def counts(generation: Generation) -> list[tuple[int, int]]:
    return [(request.input_tokens, request.output_tokens) for request in generation.requests]


def test_lengths_are_those_counted_by_hand(engine: Engine) -> None:
    generation, _ = engine.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
    assert counts(generation) == [(3, 5), (11, 5), (1, 5)]
    assert [len(ids) for ids in generation.token_ids] == [5, 5, 5]
    assert len({tuple(ids) for ids in generation.token_ids}) == 3


def test_a_sequence_that_ends_early_counts_the_token_that_ended_it(engine: Engine) -> None:
    free, _ = engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
    stop = free.token_ids[0][2]
    stopped, _ = engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    assert stopped.token_ids[0] == free.token_ids[0][:3]
    assert counts(stopped)[0] == (3, 3)


def test_the_engines_processes_are_counted_and_are_its_own(engine: Engine) -> None:
    (rank,) = engine.group.ranks
    assert len(set(rank.workers)) == 2
    assert rank.pid not in rank.workers
    assert {psutil.Process(pid).ppid() for pid in rank.workers} == {rank.pid}


def test_what_was_told_is_recorded(engine: Engine) -> None:
    assert engine.info.version.endswith("stand-in")
    assert engine.info.model == "random:llama-tiny"
    assert False in (engine.info.options.get("radix_cache"), engine.info.options.get("block_reuse"))


def test_memory_of_boards_that_the_rank_cannot_see_has_no_value(engine: Engine) -> None:
    params = GenerationParams.of({"max_new_tokens": 2, "ignore_eos": True})
    workload = task_workload(engine.group, ["abc"], params, 60)
    workload.run_round()
    assert workload.peak_memory_bytes is None


def test_stamps_are_there_where_the_engine_tells_and_nowhere_else(engine: Engine) -> None:
    _, timeline = engine.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
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
    made = Engine(SPECS[name], Parallel())
    try:
        made.generate(["abc"], max_new_tokens=2)
        with pytest.raises(BackendError, match=r"from its .*cache, .* off; the round has not done the work"):
            made.generate(["abc"], max_new_tokens=2)
    finally:
        made.pool.close()


@pytest.mark.parametrize("name", SPECS)
def test_an_option_that_the_engine_refuses_is_told_in_one_line(name: str) -> None:
    with pytest.raises(BackendError) as told:
        Engine(SPECS[name], Parallel(), dtype="float3")
    assert str(told.value) == f"{name} refuses to load random:llama-tiny: unknown dtype float3"


def test_replicas_of_sglang_are_its_own_and_those_of_tensorrt_llm_are_ours() -> None:
    degrees = Parallel(data=2, tensor=2)
    theirs, ours = Engine(sglang.SPEC, degrees), None
    try:
        assert [len(rank.workers) for rank in theirs.group.ranks] == [4]
    finally:
        theirs.pool.close()
    ours = Engine(tensorrt_llm.SPEC, degrees)
    try:
        assert [len(rank.workers) for rank in ours.group.ranks] == [2, 2]
        assert [rank.device for rank in ours.group.ranks] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    finally:
        ours.pool.close()


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_left_of_a_model_that_makes_room_for_another(name: str) -> None:
    spec, lease = SPECS[name], Lease(devices=("GPU-0", "GPU-1"))
    plan = plan_processes(spec.capabilities, Parallel(pipeline=2), lease, [0, 1], 1)
    pool, model = RankPool(timeout_s=120, isolation="run"), resolve("random:llama-tiny")
    try:
        first, _ = pool.loaded(plan, Load.of(spec, model, {}))
        before, rank = first.ranks[0].workers, first.ranks[0].pid
        second, _ = pool.loaded(plan, Load.of(spec, model, {"dtype": "float16"}))
        assert second.ranks[0].pid == rank
        assert set(second.ranks[0].workers).isdisjoint(before)
        assert not any(psutil.pid_exists(pid) for pid in before)
    finally:
        pool.close()


def test_sampling_by_a_seed_needs_what_sglang_does_it_with() -> None:
    made = Engine(sglang.SPEC, Parallel(), enable_deterministic_inference=True)
    try:
        once, again, other = (
            made.generate(PROMPTS, do_sample=True, seed=seed, max_new_tokens=4)[0].token_ids
            for seed in (1, 1, 5)
        )
        assert once == again != other
    finally:
        made.pool.close()


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
