# SPDX-License-Identifier: Apache-2.0
"""SGLang and TensorRT-LLM, which need a GPU, in real ranks over stand-ins of their public classes.

These tests check what this package does with those classes, not that the real ones behave like the stand-ins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends import sglang, tensorrt_llm
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.workers.local import LocalHost
from pytest_llenergy.workers.plan import HostDevices, plan_on_hosts
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import task_workload

from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

STAND_INS = Path(__file__).parent / "stand_ins"
SPECS = {"sglang": sglang.SPEC, "tensorrt-llm": tensorrt_llm.SPEC}


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        yield


@pytest.fixture(scope="module", params=list(SPECS))
def ranks(request: pytest.FixtureRequest) -> Iterator[LoadedRanks]:
    with LoadedRanks(SPECS[request.param], degrees=Parallel(tensor=2)) as made:
        yield made


def test_token_counts_match_hand_counts(ranks: LoadedRanks) -> None:
    generation, _ = ranks.generate(PROMPTS, max_new_tokens=5)
    assert counts(generation) == [(3, 5), (11, 5), (1, 5)]
    assert [len(ids) for ids in generation.token_ids] == [5, 5, 5]
    assert len({tuple(ids) for ids in generation.token_ids}) == 3


def test_a_sequence_that_ends_early_counts_the_token_that_ended_it(ranks: LoadedRanks) -> None:
    free, _ = ranks.generate(PROMPTS)
    stop = free.token_ids[0][2]
    stopped, _ = ranks.generate(PROMPTS, stop_token_ids=[stop])
    assert stopped.token_ids[0] == free.token_ids[0][:3]
    assert counts(stopped)[0] == (3, 3)


def test_worker_processes_are_children_of_the_rank(ranks: LoadedRanks) -> None:
    (rank,) = ranks.group.ranks
    assert len(set(rank.workers)) == 2
    assert rank.pid not in rank.workers
    assert {psutil.Process(pid).ppid() for pid in rank.workers} == {rank.pid}


def test_version_and_options_are_recorded(ranks: LoadedRanks) -> None:
    assert ranks.info.version.endswith("stand-in")
    assert ranks.info.model == TINY
    assert False in (ranks.info.options.get("radix_cache"), ranks.info.options.get("block_reuse"))


def test_memory_of_gpus_invisible_to_the_rank_is_none(ranks: LoadedRanks) -> None:
    workload = ranks.prepare(["abc"], GenerationParams(max_new_tokens=2, ignore_eos=True))
    workload.run_round()
    assert workload.peak_memory_bytes is None


def test_timestamps_exist_only_where_the_library_reports_them(ranks: LoadedRanks) -> None:
    _, timeline = ranks.generate(PROMPTS, max_new_tokens=3)
    if ranks.info.name == "sglang":
        assert timeline.borders_ns == ()
        assert {request.last_token_ns for request in timeline.requests} == {None}
    else:
        ((start_ns, border_ns),) = timeline.borders_ns
        assert start_ns < border_ns < timeline.end_ns
        assert all((r.first_token_ns or 0) < (r.last_token_ns or 0) for r in timeline.requests)


@pytest.mark.parametrize("name", SPECS)
def test_prefix_caching_despite_being_off_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CACHES", "1")
    with LoadedRanks(SPECS[name]) as made:
        made.generate(["abc"], max_new_tokens=2)
        with pytest.raises(BackendError, match=r"from its .*cache, .* off; the round has not done the work"):
            made.generate(["abc"], max_new_tokens=2)


@pytest.mark.parametrize("name", SPECS)
def test_a_prefix_cache_is_used_and_recorded_if_asked_for(name: str) -> None:
    with LoadedRanks(SPECS[name], prefix_cache=True) as made:
        first = made.generate(["abc"], max_new_tokens=2)[1]
        second = made.generate(["abc"], max_new_tokens=2)[1]
    assert first.flags == ()
    assert [flag.name for flag in second.flags] == ["prefix-cache-used"]
    assert True in (made.info.options.get("radix_cache"), made.info.options.get("block_reuse"))


@pytest.mark.parametrize("name", SPECS)
def test_common_options_and_those_of_the_library_are_passed_on(name: str) -> None:
    native = {"sglang": "max_running_requests", "tensorrt-llm": "max_batch_size"}
    draft = {"method": "prompt_lookup", "num_tokens": 3}
    options: dict[str, Any] = {
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
        "chunked_prefill": 512,
        native[name]: 4,
    }
    with LoadedRanks(SPECS[name], speculative=draft, **options) as made:
        _, timeline = made.generate(PROMPTS[:1], max_new_tokens=8)
    (request,) = timeline.requests
    # Two steps of three drafted tokens and one more each.
    assert (request.drafted_tokens, request.accepted_tokens, request.output_tokens) == (6, 6, 8)


@pytest.mark.parametrize("name", SPECS)
def test_options_that_the_library_lacks_or_the_adapter_sets_are_refused(name: str) -> None:
    hints = {
        "sglang": "ServerArgs of SGLang .* did you mean max_running_requests",
        "tensorrt-llm": "TorchLlmArgs of TensorRT-LLM .* did you mean max_batch_size",
    }
    typo: dict[str, Any] = {"sglang": {"max_runing_requests": 4}, "tensorrt-llm": {"max_batchsize": 4}}
    with pytest.raises(BackendError, match=f"{name}: {hints[name]}"):
        LoadedRanks(SPECS[name], **typo[name])
    taken = {"sglang": "disable_radix_cache", "tensorrt-llm": "kv_cache_config"}[name]
    given: dict[str, Any] = {taken: True}
    with pytest.raises(BackendError, match=f"{name}: the load option {taken} is not available: use "):
        LoadedRanks(SPECS[name], **given)


@pytest.mark.parametrize(
    ("name", "common", "own"),
    [
        ("sglang", {"chunked_prefill": True}, {"chunked_prefill_size": -1}),
        ("tensorrt-llm", {"compile": False}, {"torch_compile_config": {}}),
    ],
)
def test_an_option_that_contradicts_a_common_one_is_refused(
    name: str, common: dict[str, Any], own: dict[str, Any]
) -> None:
    with pytest.raises(BackendError, match=f"{name}: {next(iter(common))} sets {next(iter(own))} as well"):
        LoadedRanks(SPECS[name], **common, **own)


@pytest.mark.parametrize("name", SPECS)
def test_no_source_claims_a_test_of_what_has_not_run(name: str) -> None:
    row = SPECS[name].capabilities
    assert row.hardware is None
    assert "tested" not in row.sources.values()
    assert row.sources["hardware"] == "run with a stand-in only"


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_refused_option_gives_a_one_line_error(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        LoadedRanks(SPECS[name], dtype="float3")
    assert str(caught.value) == f"{name} refuses to load random:llama-tiny: unknown dtype float3"


@pytest.mark.parametrize(
    ("degrees", "worlds"), [(Parallel(tensor=2, pipeline=2), 2), (Parallel(data=2, tensor=2), 1)]
)
def test_sglang_is_launched_on_each_host(degrees: Parallel, worlds: int) -> None:
    hosts = {name: LocalHost("spawn") for name in ("n1", "n2")}
    holds = [HostDevices(name, Lease(devices=(f"GPU-{name}0", f"GPU-{name}1")), [0]) for name in hosts]
    plan = plan_on_hosts(sglang.SPEC.capabilities, degrees, holds, 1)
    assert plan.nodes == worlds
    pool = RankPool(60.0, "spawn", "backend")
    try:
        pool.use_hosts(hosts)
        group, _ = pool.get_loaded(plan, Load.from_options(sglang.SPEC, resolve_model(TINY), {}))
        assert [len(rank.workers) for rank in group.ranks] == [2, 2]
        workload = task_workload(group, PROMPTS, GenerationParams(max_new_tokens=3), 60.0)
        requests = workload.run_round().requests
        assert [(each.input_tokens, each.output_tokens) for each in requests] == [(3, 3), (11, 3), (1, 3)]
        assert len(workload.results()) == 2 // worlds
    finally:
        pool.close()
        for host in hosts.values():
            host.close()


@pytest.mark.slow
def test_sglang_creates_its_replicas_and_the_plugin_those_of_tensorrt_llm() -> None:
    degrees = Parallel(data=2, tensor=2)
    with LoadedRanks(sglang.SPEC, degrees=degrees) as theirs:
        assert [len(rank.workers) for rank in theirs.group.ranks] == [4]
    with LoadedRanks(tensorrt_llm.SPEC, degrees=degrees) as ours:
        assert [len(rank.workers) for rank in ours.group.ranks] == [2, 2]
        assert [rank.device for rank in ours.group.ranks] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_workers_of_a_replaced_model_exit(name: str) -> None:
    with LoadedRanks(SPECS[name], degrees=Parallel(pipeline=2)) as made:
        (before,) = made.group.ranks
        made.load(dtype="float16")
        (after,) = made.group.ranks
        assert after.pid == before.pid
        assert set(after.workers).isdisjoint(before.workers)
        assert not any(psutil.pid_exists(pid) for pid in before.workers)


@pytest.mark.slow
def test_sglang_samples_by_seed_with_deterministic_inference() -> None:
    with LoadedRanks(sglang.SPEC, enable_deterministic_inference=True) as made:
        once, again, other = (
            made.generate(PROMPTS, do_sample=True, seed=seed, max_new_tokens=4)[0].token_ids
            for seed in (1, 1, 5)
        )
    assert once == again != other


def test_without_a_gpu_their_tests_skip_with_a_reason(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.makepyfile("def test_it(backend): pass")
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}")
    result = quick.runpytest_subprocess(
        "-rs", "-p", "no:cacheprovider", "--energy-backend=sglang,tensorrt-llm"
    )
    result.assert_outcomes(skipped=2)
    actual = " ".join(result.stdout.str().split())
    assert "sglang does not run on the CPU here (the wheel on PyPI is for CUDA)" in actual
    assert "tensorrt-llm does not run on the CPU here (TensorRT-LLM runs on NVIDIA GPUs only)" in actual
