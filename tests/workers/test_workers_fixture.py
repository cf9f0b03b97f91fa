# SPDX-License-Identifier: Apache-2.0
"""The ``workers`` fixture in real test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Read = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_of_the_test_file_run_on_every_rank(
    quick: pytest.Pytester, read_report: Read, mode: str
) -> None:
    quick.makepyfile(
        """
        import os
        import pytest
        FACTOR = 3
        def helper(x):
            return x * FACTOR
        def rank_times(x):
            return int(os.environ["RANK"]) * helper(x)
        pids = set()
        @pytest.mark.gpus(2, fallback="cpu")
        def test_run(workers):
            assert workers.run(rank_times, 5) == [0, 15]
            assert workers.run(lambda: os.environ["WORLD_SIZE"]) == ["2", "2"]
            assert workers.run("os.path:join", "a", "b") == ["a/b", "a/b"]
            pids.update(workers.run(os.getpid))
        @pytest.mark.gpus(2, fallback="cpu")
        def test_the_same_ranks_again(workers):
            assert set(workers.run(os.getpid)) == pids and len(pids) == 2
        @pytest.mark.gpus(2, fallback="cpu")
        def test_energy(energy, workers):
            run = energy(workers.call(rank_times, 7))
            assert run.result == [0, 21]
        @pytest.mark.gpus(2, fallback="cpu")
        def test_a_plain_function_runs_in_the_ranks_too(energy):
            run = energy(rank_times, 2)
            assert run.result == [0, 6]
        """
    )
    result = quick.runpytest("--energy-report", f"--import-mode={mode}")
    result.assert_outcomes(passed=4)
    records = read_report()["records"]
    for record in records:
        assert record["fallback"] == "cpu"
        assert record["devices"] == ["cpu", "cpu"]
        assert record["start_method"] == "spawn"
        assert record["launch"] == "ranks"
        assert record["parallel"] == {"data": 2, "tensor": 1, "pipeline": 1}
        assert [(rank["rank"], rank["local_rank"]) for rank in record["ranks"]] == [(0, 0), (1, 1)]
    assert len({rank["pid"] for record in records for rank in record["ranks"]}) == 2


def test_failures_in_ranks_are_those_of_the_test(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        def check():
            left, right = 3, 4
            assert left == right
        def test_assert(workers):
            workers.run(check)
        def test_skip(workers):
            workers.run(pytest.skip, "no such kernel")
        def test_again(workers):
            assert workers.run(max, 1, 2) == [2]
        @pytest.mark.parallel(data=2)
        def test_contradiction(energy, workers):
            workers.run(max, 1, 2)
        def test_arguments(energy, workers):
            energy(workers.call(max, 1, 2), 3)
        """
    )
    result = quick.runpytest("--energy-report", "-rs")
    result.assert_outcomes(failed=3, skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "WorkerError: rank 0 of 1 (cpu, pid *): AssertionError: assert 3 == 4",
            "PlanError: parallel(data=2, tensor=1, pipeline=1) needs 2 devices and the lease has 1; *",
            "LLEnergyError: energy(workers.call(fn, ...)): give the arguments to call, not to energy",
            "SKIPPED*no such kernel",
        ]
    )


GROUPS = """
import pytest

N = {n}
pytestmark = pytest.mark.gpus(N, fallback="cpu")

def state():
    from accelerate import PartialState
    import torch.distributed as dist
    found = PartialState(cpu=True)
    return (dist.get_backend(), dist.get_rank(), dist.get_world_size(), found.num_processes,
            found.process_index, found.local_process_index, found.device.type)

def test_state(workers):
    assert workers.run(state) == [("gloo", rank, N, N, rank, rank, "cpu") for rank in range(N)]

def gradients():
    # Each rank has its part of a batch: the gradients must be those of the whole batch.
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 2)
    batch = torch.arange(12.0 * N).reshape(4 * N, 3)
    together = DistributedDataParallel(torch.nn.Linear(3, 2))
    together.module.load_state_dict(alone.state_dict())
    output = together(batch.chunk(N)[dist.get_rank()])
    output.square().mean().backward()
    expected = alone(batch)
    expected.square().mean().backward()
    same_output = torch.allclose(output, expected.chunk(N)[dist.get_rank()])
    return same_output, torch.allclose(together.module.weight.grad, alone.weight.grad)

def test_ddp(workers):
    assert workers.run(gradients) == [(True, True)] * N

def add_up(numbers):
    import torch
    import torch.distributed as dist
    value = torch.full((numbers,), dist.get_rank() + 1.0)
    dist.all_reduce(value)
    return float(value.mean())

def test_allreduce(energy, workers):
    assert energy(workers.call(add_up, 1000)).result == [N * (N + 1) / 2] * N
"""


@pytest.mark.parametrize("n", [1, 2, 4])
def test_real_process_groups_are_what_libraries_find(
    quick: pytest.Pytester, read_report: Read, n: int
) -> None:
    quick.makepyfile(GROUPS.format(n=n))
    result = quick.runpytest("--energy-report", "--energy-start-method=forkserver")
    result.assert_outcomes(passed=3)
    (record,) = read_report()["records"]
    assert (record["launch"], record["start_method"], len(record["ranks"])) == ("ranks", "forkserver", n)
    assert all(round_["energy_j"] > 0 for round_ in record["rounds"])
