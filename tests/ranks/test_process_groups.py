# SPDX-License-Identifier: Apache-2.0
"""Real process groups of one, two and four ranks, as accelerate, DDP and torch.distributed see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Read = Callable[..., dict[str, Any]]


GROUPS = """
import pytest

N = {n}
pytestmark = pytest.mark.gpus(N, fallback="cpu")

def state():
    from accelerate import Accelerator
    import torch
    import torch.distributed as dist
    # Told by the environment that it is on CPUs: no argument, no launcher.
    found = Accelerator()
    assert not torch.cuda.is_initialized()
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
    import time
    import torch
    import torch.distributed as dist
    value = torch.full((numbers,), dist.get_rank() + 1.0)
    dist.all_reduce(value)
    # Ten watts are known well only over many ticks.
    time.sleep(0.2)
    return float(value.mean())

def test_allreduce(energy, workers):
    total = N * (N + 1) / 2
    assert energy(workers.call(add_up, 1000)).result == (total if N == 1 else [total] * N)
"""


@pytest.mark.parametrize(
    "n", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_torch_and_accelerate_find_the_process_group(
    quick: pytest.Pytester, read_report: Read, n: int
) -> None:
    quick.makepyfile(GROUPS.format(n=n))
    result = quick.runpytest("--energy-report", "--energy-start-method=forkserver")
    result.assert_outcomes(passed=3)
    (record,) = read_report()["records"]
    assert (record["launch"], record["start_method"], len(record["ranks"])) == ("ranks", "forkserver", n)
    for round_ in record["rounds"]:
        assert round_["duration_s"] >= 0.2
        assert round_["energy_j"] == pytest.approx(10 * round_["duration_s"], abs=0.5)
