# SPDX-License-Identifier: Apache-2.0
"""vLLM for real, on the CPU: token truth, workers in separate processes, nothing left behind.

Runs in the environment that ``LLENERGY_TEST_VLLM_PYTHON`` names, see ``tox -e vllm``, or in this one.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends import vllm
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.backends.vllm import VllmJob
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError, LLEnergyError, WorkerError
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import HostDevices, plan_on_hosts
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.workload import task_workload
from pytest_llenergy.record.record import Parallel
from pytest_llenergy.record.timeline import Timeline

from ..hosts.remote_ranks import open_gang
from ..ranks.survivors import await_none, marked
from .loaded_ranks import PROMPTS, TINY, LoadedRanks, counts

SPEC = dataclasses.replace(vllm.SPEC, python=os.environ.get("LLENERGY_TEST_VLLM_PYTHON") or None)
MISSING = SPEC.explain_unavailable()

needs_vllm = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}; or set LLENERGY_TEST_VLLM_PYTHON")

#: Without compilation, which takes minutes; 32-bit floats give the same tokens in every backend.
EAGER: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}


#: Repetitive, so that continuations can be looked up in them.
REPETITIVE = ["abc abc abc abc", "xyzxyzxyz"]


def refusal(expected: type[LLEnergyError], **asked: Any) -> str:
    """Return the error of loading with these options."""
    with pytest.raises(expected) as caught:
        LoadedRanks(SPEC, **asked)
    return str(caught.value.args[0])


@pytest.fixture(scope="module")
def alone() -> Iterator[LoadedRanks]:
    with LoadedRanks(SPEC, **EAGER) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def free(alone: LoadedRanks) -> Generation:
    """Eight tokens for each prompt."""
    return alone.generate(PROMPTS)[0]


@pytest.fixture(scope="module")
def sharded() -> Iterator[LoadedRanks]:
    with LoadedRanks(SPEC, degrees=Parallel(tensor=2), **EAGER) as ranks:
        yield ranks


@needs_vllm
class TestOneProcess:
    def test_tokens_match_transformers(self, free: Generation) -> None:
        with LoadedRanks(dtype="float32") as reference:
            expected, _ = reference.generate(PROMPTS)
        assert free.token_ids == expected.token_ids
        assert free.texts == expected.texts

    def test_each_token_has_a_timestamp_within_the_round(self, alone: LoadedRanks) -> None:
        _, timeline = alone.generate(PROMPTS, max_new_tokens=6)
        ((start_ns, border_ns),) = timeline.borders_ns
        for request in timeline.requests:
            stamps = request.token_ns
            assert len(stamps) == 6
            assert start_ns < stamps[0] <= border_ns
            assert list(stamps) == sorted(set(stamps))
            assert (request.first_token_ns, request.last_token_ns) == (stamps[0], stamps[-1])
            assert stamps[-1] <= timeline.end_ns

    def test_a_repeated_prompt_is_computed_again(self, alone: LoadedRanks) -> None:
        """A prompt longer than a cache block (128 tokens), the unit of reuse."""
        workload = alone.prepare(["y" * 300], GenerationParams(max_new_tokens=2, ignore_eos=True))
        for _ in range(2):
            (request,) = workload.run_round().requests
            assert request.input_tokens == 300
        assert alone.info.options["enable_prefix_caching"] is False

    def test_a_batch_that_would_be_truncated_is_refused(self, alone: LoadedRanks) -> None:
        with (
            LoadedRanks(SPEC, **{**EAGER, "max_model_len": 16}) as ranks,
            pytest.raises(BackendError) as caught,
        ):
            ranks.generate(["a" * 10], max_new_tokens=7)
        assert caught.value.args[0] == (
            "vllm: longest prompt and max_new_tokens are 17 tokens; the model has room for 16"
        )

    def test_resolved_settings_are_recorded(self, alone: LoadedRanks) -> None:
        info, options = alone.info, alone.info.options
        assert (info.name, info.model, info.dtype) == ("vllm", TINY, "float32")
        assert options["enforce_eager"] is True
        assert options["max_model_len"] == 512
        assert options["kv_cache_memory_bytes"] == 1 << 30
        assert {"torch", "python", "max_num_batched_tokens", "distributed_executor_backend"} <= set(options)


@needs_vllm
class TestShards:
    def test_shards_give_the_tokens_of_one_process(self, sharded: LoadedRanks, free: Generation) -> None:
        generation, timeline = sharded.generate(PROMPTS)
        assert generation.token_ids == free.token_ids
        assert len(timeline.ranks) == 1

    def test_shards_are_two_worker_processes_on_separate_cores(self, sharded: LoadedRanks) -> None:
        (rank,) = sharded.group.ranks
        first, second = rank.workers
        assert rank.pid not in (first, second)
        assert {psutil.Process(pid).ppid() for pid in (first, second)} == {rank.pid}
        cores = [psutil.Process(pid).cpu_affinity() for pid in (first, second)]
        assert [len(each or []) for each in cores] == [1, 1]
        assert cores[0] != cores[1]

    def test_shards_exit_when_the_model_is_replaced(self) -> None:
        with LoadedRanks(SPEC, degrees=Parallel(tensor=2), **EAGER) as ranks:
            (before,) = ranks.group.ranks
            ranks.load(**{**EAGER, "max_model_len": 256})
            (after,) = ranks.group.ranks
            ranks.close()
        assert after.pid == before.pid
        assert len({*before.workers, *after.workers}) == 4
        assert not any(psutil.pid_exists(pid) for pid in (before.pid, *before.workers, *after.workers))


def generate_over_hosts(directory: Path, *, kill: bool = False) -> tuple[RankGroup, Timeline, Generation]:
    """Generate with a model whose two shards are on two hosts; kill that on the second one if asked."""
    holds = [HostDevices(name, Lease(devices=("cpu",)), [cpu]) for cpu, name in enumerate(("n1", "n2"))]
    plan = plan_on_hosts(SPEC.capabilities, Parallel(tensor=2), holds, 1, SPEC.python)
    pool = RankPool(300.0, "spawn", "module")
    with open_gang(directory) as gang:
        try:
            pool.use_hosts(gang.hosts)
            group, _ = pool.get_loaded(plan, Load(SPEC, resolve_model(TINY), EAGER))
            params = GenerationParams(max_new_tokens=400 if kill else 8, ignore_eos=True)
            workload = task_workload(group, PROMPTS, params, 300.0)
            if kill:
                Timer(1.0, os.kill, (group.ranks[1].workers[0], signal.SIGKILL)).start()
            timeline = workload.run_round()
            return group, timeline, workload.results()[0]
        finally:
            pool.close()


@needs_vllm
class TestTwoHosts:
    def test_shards_on_two_hosts_give_the_tokens_of_one_process(
        self, tmp_path: Path, free: Generation
    ) -> None:
        with marked() as mark:
            group, timeline, generation = generate_over_hosts(tmp_path)
            assert await_none(mark) == {}
        assert generation.token_ids == free.token_ids
        assert [(each.input_tokens, each.output_tokens) for each in timeline.requests] == counts(free)
        assert len(timeline.borders_ns) == 1
        first, second = group.ranks
        assert (first.host, second.host) == ("n1", "n2")
        assert len({first.pid, second.pid, *first.workers, *second.workers}) == 4
        assert [each.tensor for rank in group.ranks for each in rank.worker_coordinates] == [0, 1]

    def test_a_shard_that_dies_on_another_host_ends_the_test(self, tmp_path: Path) -> None:
        """The rank that waits for the shard has vLLM's own error."""
        with marked() as mark:
            with pytest.raises(WorkerError, match=r"^rank 0 of 2 on n1 .*Connection closed by peer"):
                generate_over_hosts(tmp_path, kill=True)
            assert await_none(mark) == {}


@needs_vllm
class TestOptions:
    """What load options do, beside the load without them."""

    def test_prompt_lookup_gives_the_same_tokens_and_counts_drafts(self, alone: LoadedRanks) -> None:
        expected = alone.generate(REPETITIVE, max_new_tokens=24)[0].token_ids
        draft = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
        with LoadedRanks(SPEC, speculative_config=draft, **EAGER) as ranks:
            generation, timeline = ranks.generate(REPETITIVE, max_new_tokens=24)
            assert ranks.info.options["method"] == "ngram"
        assert generation.token_ids == expected
        for request in timeline.requests:
            drafted, accepted = request.drafted_tokens or 0, request.accepted_tokens or 0
            # Each step makes one token itself. Drafts that exceed max_new_tokens are accepted and cut.
            steps = len(set(request.token_ns))
            assert request.output_tokens == len(request.token_ns) == 24
            assert 0 < 24 - steps <= accepted <= drafted
            assert accepted - (24 - steps) <= 4

    def test_drafts_of_the_model_itself_are_accepted(self, alone: LoadedRanks) -> None:
        expected = alone.generate(REPETITIVE, max_new_tokens=24)[0].token_ids
        draft = {"model": pretrained_path(resolve_model(TINY)), "num_speculative_tokens": 5}
        with LoadedRanks(SPEC, speculative_config={"method": "draft_model", **draft}, **EAGER) as ranks:
            generation, timeline = ranks.generate(REPETITIVE, max_new_tokens=24)
        assert generation.token_ids == expected
        drafted = sum(request.drafted_tokens or 0 for request in timeline.requests)
        accepted = sum(request.accepted_tokens or 0 for request in timeline.requests)
        assert 0.9 * drafted < accepted <= drafted


@needs_vllm
class TestRefusedOptions:
    def test_an_unknown_option_is_refused_by_vllm(self) -> None:
        message = refusal(BackendError, max_num_seq=2)
        assert message.startswith("model random:llama-tiny: vllm cannot load it with max_num_seq=2 (")
        assert "unexpected keyword argument 'max_num_seq'" in message

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"seed": 1}, "vllm: the load option seed is not available: it is an argument of generate"),
            (
                {"enable_prefix_caching": True},
                "vllm: the load option enable_prefix_caching is not available: the plugin sets it",
            ),
        ],
    )
    def test_what_the_adapter_sets_is_refused_with_the_reason(
        self, given: dict[str, Any], message: str
    ) -> None:
        assert refusal(BackendError, **given).startswith(message)


def test_prompt_tokens_from_a_cache_are_detected() -> None:
    made, ids = [SimpleNamespace(token_ids=[7])], [1] * 130
    output = SimpleNamespace(request_id="0", num_cached_tokens=128, outputs=made, prompt_token_ids=ids)
    job = VllmJob(None, None, [ids], [None])
    with pytest.raises(BackendError, match="took 128 prompt tokens from its prefix cache, which should be"):
        job.result([(1, [output])])
