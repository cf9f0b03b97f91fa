# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank: set its environment before anything can be imported, then become the planned rank.

Standard library only, and run as a script, so that not even this package is imported before the environment
is set. The order is fixed, since devices are frozen by the first use of CUDA, and NCCL needs the device:
environment, import torch, check the devices, process group, barrier, ready.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int, *, preloaded: bool = False) -> None:
    """Receive the plan over a socket, set up the rank, then serve requests until the socket closes.

    ``preloaded`` is whether this is a fork of a process that has imported torch without using it.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    boot: dict[str, Any] = connection.recv()
    # The last lines of a rank that dies must be in its log.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Works also while one thread holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    try:
        facts = set_up(boot, preloaded=preloaded)
    except BaseException as error:
        report = {"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        connection.send(("error", {"time_ns": time.monotonic_ns(), **report}))
        raise SystemExit(1) from error
    from pytest_llenergy.ranks.server import RankServer

    server = RankServer(connection, boot)
    connection.send(("ok", facts))
    server.run()
    # Finalising an interpreter with torch takes a second, for nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def set_up(boot: dict[str, Any], *, preloaded: bool) -> dict[str, Any]:
    """Become the planned rank. Returns facts that pytest checks against the plan."""
    if "torch" in sys.modules and not preloaded:
        raise RuntimeError(
            "torch was imported before the rank could set its devices (sitecustomize or .pth?)"
        )
    # It was started with these variables; sitecustomize or a .pth file may have changed them since.
    os.environ.update(boot["environment"])
    sys.path[:] = boot["sys_path"] or isolated_search_path(boot)
    if boot["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, boot["cpus"])
    facts: dict[str, Any] = {"world_size": 1, "devices": boot["devices"]}
    if boot["framework"] == "torch":
        facts = start_torch(boot)
    cpus = sorted(os.sched_getaffinity(0)) if boot["cpus"] and hasattr(os, "sched_getaffinity") else None
    return {"pid": os.getpid(), "threads": boot["threads"], "cpus": cpus, **facts}


def isolated_search_path(boot: dict[str, Any]) -> list[str]:
    """Return the search path of an interpreter of another environment, with this package and no other added.

    By a directory with a link, since processes that a backend starts inherit only the search path.
    """
    directory = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs too much here
    package = os.path.dirname(directory)  # noqa: PTH120
    links = os.path.join(boot["directory"], f"package{boot['rank']}")  # noqa: PTH118
    os.mkdir(links)  # noqa: PTH102
    os.symlink(package, os.path.join(links, os.path.basename(package)))  # noqa: PTH118, PTH119, PTH211
    return [links, *(path for path in sys.path if path != directory)]


def start_torch(boot: dict[str, Any]) -> dict[str, Any]:
    """Import torch, check that it sees the planned devices and no others, join the process group."""
    import torch

    torch.set_num_threads(boot["threads"])
    planned = [device for device in boot["devices"] if device != "cpu"]
    # Counting initialises nothing on CPU builds, and only this rank's devices elsewhere.
    count = torch.cuda.device_count()
    if count != len(planned):
        raise RuntimeError(
            f"the plan gives this rank {', '.join(boot['devices'])}, torch sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
    found = ["cpu"]
    if planned:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        found = [_planned_name(uuid, wanted, boot) for uuid, wanted in zip(uuids, planned, strict=True)]
        if found != planned:
            raise RuntimeError(
                f"the plan gives this rank {', '.join(planned)}, torch sees {', '.join(found)}"
            )
    world_size = 1
    if boot["process_group"]:
        import torch.distributed as dist

        dist.init_process_group(
            # NCCL does not run on MIG instances (github.com/NVIDIA/nccl, issue 431).
            "nccl" if planned and not planned[0].startswith("MIG-") else "gloo",
            init_method=boot["rendezvous"],
            rank=boot["rank"],
            world_size=boot["world_size"],
        )
        dist.barrier()
        world_size = dist.get_world_size()
    return {"world_size": world_size, "devices": found, "threads": torch.get_num_threads()}


def _planned_name(uuid: str, planned: str, boot: dict[str, Any]) -> str:
    """Return the plan's name of the device with this UUID in CUDA.

    For a MIG instance some versions of CUDA return its own UUID and some that of its board.
    """
    names = [f"{prefix}{uuid}" for prefix in ("GPU-", "MIG-")]
    if planned in names or (planned.startswith("MIG-") and names[0] in boot["divided"]):
        return planned
    return names[0]


if __name__ == "__main__":
    main(int(sys.argv[1]))
