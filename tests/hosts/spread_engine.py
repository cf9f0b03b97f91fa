# SPDX-License-Identifier: Apache-2.0
"""Small inference engines whose parts gloo connects. Each token is the sum of ``rank + 1`` over these parts.

``SPEC`` is launched symmetrically, as vLLM is: the same on each host, with a worker process for
each device. The parts of ``SHARDED`` are ranks of the plugin, as those of transformers are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, BackendWorker, Capabilities, RankContext
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

SPEC = BackendSpec(
    name="spread",
    factory="tests.hosts.spread_engine:SpreadBackend",
    requires=("torch",),
    install="pip install torch",
    capabilities=Capabilities(
        launch="backend",
        hosts="several",
        data=True,
        tensor=True,
        pipeline=True,
        gpu=True,
        options=("token_s",),
        timestamps="token",
    ),
)

#: How long a token takes by default (seconds).
TOKEN_S = 0.01

#: Follows the number of tokens that the first worker reads, and prints one when it is ready and each token.
WORKER = """
import sys, time
import torch
import torch.distributed as dist

url, rank, size, token_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
dist.barrier()
print(dist.get_world_size(), flush=True)
while True:
    count = torch.tensor([int(sys.stdin.readline() or -1) if rank == 0 else 0])
    dist.broadcast(count, 0)
    if count < 0:
        break
    for _ in range(int(count)):
        time.sleep(token_s)
        token = torch.tensor([rank + 1])
        dist.all_reduce(token)
        if rank == 0:
            print(int(token), flush=True)
"""


def describe(prompts: Sequence[str], outcome: list[list[tuple[int, int]]]) -> Generation:
    """Return tokens and times of a batch, given as pairs."""
    token_ids = [[token for token, _ in made] for made in outcome]
    requests = [
        RequestTimeline(
            input_tokens=len(prompt),
            output_tokens=len(made),
            first_token_ns=made[0][1],
            last_token_ns=made[-1][1],
            token_ns=tuple(time_ns for _, time_ns in made),
        )
        for prompt, made in zip(prompts, outcome, strict=True)
    ]
    return Generation(texts=[str(ids) for ids in token_ids], token_ids=token_ids, requests=requests)


@dataclass
class SpreadJob:
    """Generates a number of tokens for each prompt in turn."""

    worker: subprocess.Popen[str]
    prompts: Sequence[str]
    new_tokens: int

    def run(self) -> list[list[tuple[int, int]]]:
        return [[self._generate_token(first) for first in self._starts()] for _ in self.prompts]

    def result(self, outcome: list[list[tuple[int, int]]]) -> Generation:
        return describe(self.prompts, outcome)

    def _starts(self) -> list[bool]:
        return [number == 0 for number in range(self.new_tokens)]

    def _generate_token(self, first: bool) -> tuple[int, int]:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        if first:
            self.worker.stdin.write(f"{self.new_tokens}\n")
            self.worker.stdin.flush()
        line = self.worker.stdout.readline()
        if not line:
            assert self.worker.stderr is not None
            last = self.worker.stderr.read().strip().rpartition("\n")[2]
            raise RuntimeError(f"worker 0 ended with exit code {self.worker.wait()}: {last}")
        return int(line), time.monotonic_ns()


class SpreadBackend:
    """The engine: one worker process for each device of its host."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        size = context.parallel.tensor * context.parallel.pipeline
        here = size // context.nodes
        ranks = range(context.node_rank * here, (context.node_rank + 1) * here)
        meets = (
            "tcp://{}:{}".format(*context.master) if context.master else f"file://{context.scratch}/meeting"
        )
        arguments = [meets, str(size), str(options.get("token_s", TOKEN_S))]
        self._workers = {
            rank: subprocess.Popen(
                [sys.executable, "-c", WORKER, arguments[0], str(rank), *arguments[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        }
        for worker in self._workers.values():
            assert worker.stdout is not None
            self._size = int(worker.stdout.readline())
        given = {"nodes": context.nodes, "node_rank": context.node_rank, "devices": context.devices}
        return BackendInfo(
            name="spread", version="1", model=model.label, options={"given": json.dumps(given)}
        )

    def workers(self) -> Sequence[BackendWorker]:
        return [
            BackendWorker(pid=worker.pid, rank=rank, world_size=self._size)
            for rank, worker in self._workers.items()
        ]

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> SpreadJob:
        return SpreadJob(self._workers[0], prompts, params.max_new_tokens)

    def synchronize(self) -> None:
        """A token is printed when it is there."""

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.wait()


SHARDED = BackendSpec(
    name="sharded",
    factory="tests.hosts.spread_engine:ShardedBackend",
    requires=("torch",),
    install="pip install torch",
    capabilities=Capabilities(framework="torch", data=True, tensor=True, gpu=True, timestamps="token"),
)


@dataclass
class ShardedJob:
    """Generates a number of tokens for each prompt in turn, together with the other ranks of its copy."""

    part: int
    copy: Any
    prompts: Sequence[str]
    new_tokens: int

    def run(self) -> list[list[tuple[int, int]]]:
        return [[self._generate_token() for _ in range(self.new_tokens)] for _ in self.prompts]

    def result(self, outcome: list[list[tuple[int, int]]]) -> Generation:
        return describe(self.prompts, outcome)

    def _generate_token(self) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        time.sleep(TOKEN_S)
        token = torch.tensor([self.part])
        dist.all_reduce(token, group=self.copy)
        return int(token), time.monotonic_ns()


class ShardedBackend:
    """The engine: each rank is a shard of the copy to which the degrees assign it."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import torch.distributed as dist

        size = context.parallel.tensor
        copies = [
            dist.new_group(list(range(first, first + size))) for first in range(0, context.world_size, size)
        ]
        self._part, self._copy = context.rank + 1, copies[context.rank // size]
        return BackendInfo(name="sharded", version="1", model=model.label)

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> ShardedJob:
        return ShardedJob(self._part, self._copy, prompts, params.max_new_tokens)

    def synchronize(self) -> None:
        """Each token is read when it is there."""

    def close(self) -> None:
        """The rank ends its process group."""
