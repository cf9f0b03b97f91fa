# SPDX-License-Identifier: Apache-2.0
"""Entry of a rank: a fresh interpreter that is told who it is before anything can be imported.

Standard library only, and run as a script, so that not even this package is imported before the
environment is set. The order is fixed: environment, devices, framework, check, process group, ready.
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
    """Boot from the plan that comes over the socket, then serve requests until it closes.

    A ``preloaded`` rank is a fork of a process that has imported torch, and has done nothing with it.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    boot: dict[str, Any] = connection.recv()
    # What was printed last is what is wanted of a rank that dies.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Says where every thread is, also while one holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    try:
        hello = set_up(boot, preloaded=preloaded)
    except BaseException as error:
        said = {"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        connection.send(("error", {"time_ns": time.monotonic_ns(), **said}))
        raise SystemExit(1) from error
    from pathlib import Path

    from pytest_llenergy.workers.server import Server
    from pytest_llenergy.workers.transport import Channel

    server = Server(Channel(connection, Path(boot["directory"])), boot)
    connection.send(("ok", hello))
    server.run()
    # Taking down torch's interpreter takes a second in which nothing more can happen.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def set_up(boot: dict[str, Any], *, preloaded: bool = False) -> dict[str, Any]:
    """Become the planned rank. Returns what was seen, which the parent holds against the plan."""
    if "torch" in sys.modules and not preloaded:
        raise RuntimeError(
            "torch was imported before the rank could set its devices (sitecustomize or .pth?)"
        )
    # It was started with these; a sitecustomize or a .pth file may have had its own ideas since.
    os.environ.update(boot["environment"])
    sys.path[:] = boot["sys_path"] or isolated_search_path(boot)
    if boot["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, boot["cpus"])
    seen: dict[str, Any] = {"framework": None, "world_size": 1, "devices": boot["devices"]}
    if boot["framework"] == "torch":
        seen = start_torch(boot)
    cpus = sorted(os.sched_getaffinity(0)) if boot["cpus"] and hasattr(os, "sched_getaffinity") else None
    return {"pid": os.getpid(), "threads": boot["threads"], "cpus": cpus, **seen}


def isolated_search_path(boot: dict[str, Any]) -> list[str]:
    """That of an interpreter of another environment, where of pytest's packages only this one is found.

    A directory and no import hook: the processes that an engine starts inherit the search path alone.
    """
    room = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs too much here
    package = os.path.dirname(room)  # noqa: PTH120
    shown = os.path.join(boot["directory"], f"package{boot['rank']}")  # noqa: PTH118
    os.mkdir(shown)  # noqa: PTH102
    os.symlink(package, os.path.join(shown, os.path.basename(package)))  # noqa: PTH118, PTH119, PTH211
    return [shown, *(path for path in sys.path if path != room)]


def start_torch(boot: dict[str, Any]) -> dict[str, Any]:
    """Import torch, check that it sees the planned device and no other, join the process group."""
    import torch

    torch.set_num_threads(boot["threads"])
    planned = [device for device in boot["devices"] if device != "cpu"]
    # Asking for the count initialises nothing on CPU builds and only this rank's devices elsewhere.
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
        found = [_seen(uuid, wanted, boot) for uuid, wanted in zip(uuids, planned, strict=True)]
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
    return {
        "framework": f"torch {torch.__version__}",
        "world_size": world_size,
        "devices": found,
        "threads": torch.get_num_threads(),
    }


def _seen(uuid: str, planned: str, boot: dict[str, Any]) -> str:
    """The device that CUDA calls by this UUID, named as in plans.

    Of a MIG instance some versions of CUDA give its own UUID and some that of its board.
    """
    names = [f"{prefix}{uuid}" for prefix in ("GPU-", "MIG-")]
    if planned in names or (planned.startswith("MIG-") and names[0] in boot["divided"]):
        return planned
    return names[0]


if __name__ == "__main__":
    main(int(sys.argv[1]))
