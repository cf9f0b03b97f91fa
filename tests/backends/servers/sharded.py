# SPDX-License-Identifier: Apache-2.0
"""The scripted server with a process on each of its first boards: sharded.py PORT SHARDS [SETTING=VALUE …].

The boards are those of ``CUDA_VISIBLE_DEVICES``, or else all of the simulated world. A shard does nothing but
appear on its board, as a process with a CUDA context does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.backends.servers import scripted
from tests.nvml_sim.boards import Process
from tests.nvml_sim.world import WORLD_VARIABLE, World


def main(port: str, shards: str, *settings: str) -> None:
    world = World.open(os.environ[WORLD_VARIABLE])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    boards = range(int(shards)) if visible is None else map(world.index_of, filter(None, visible.split(",")))
    for index in list(boards)[: int(shards)]:
        words = [sys.executable, "-m", __spec__.name, "shard", str(index)]
        shard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert shard.stdout is not None
        shard.stdout.readline()
    scripted.main(port, *settings)


def shard(index: str) -> None:
    """Be on a board until the server has gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    world = World.open(os.environ[WORLD_VARIABLE])
    world.update(int(index), processes=(Process(os.getpid()),))
    try:
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        world.update(int(index), processes=())


if __name__ == "__main__":
    if sys.argv[1] == "shard":
        shard(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
