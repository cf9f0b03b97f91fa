# SPDX-License-Identifier: Apache-2.0
"""Entry of a rank: a fresh interpreter that is told who it is before anything can be imported.

Standard library only, and run as a script, so that not even this package is imported before the
environment is set. The order is fixed: environment, devices, framework, check, process group, ready.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Boot from the plan that comes over the socket, then serve requests until it closes."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    boot: dict[str, Any] = connection.recv()
    try:
        hello = start(boot)
    except BaseException as error:
        said = {"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        connection.send(("error", {"time_ns": time.monotonic_ns(), **said}))
        raise SystemExit(1) from error
    from pytest_llenergy.workers.serve import Server

    connection.send(("ok", hello))
    Server(connection, boot).run()
    # Taking down torch's interpreter takes a second in which nothing more can happen.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def start(boot: dict[str, Any]) -> dict[str, Any]:
    """Become the planned rank. Returns what was seen, which the parent holds against the plan."""
    _die_with_parent(boot["parent_pid"])
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch was imported before the rank could set its devices (sitecustomize or .pth?)"
        )
    for name in [name for name in os.environ if name.startswith(boot["stale_prefixes"])]:
        del os.environ[name]
    os.environ.update(boot["environment"])
    sys.path[:] = boot["sys_path"]
    if boot["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, boot["cpus"])
    seen: dict[str, Any] = {"framework": None, "world_size": 1, "device": boot["device"]}
    if boot["framework"] == "torch":
        seen = start_torch(boot)
    cpus = sorted(os.sched_getaffinity(0)) if boot["cpus"] and hasattr(os, "sched_getaffinity") else None
    return {"pid": os.getpid(), "threads": boot["threads"], "cpus": cpus, **seen}


def start_torch(boot: dict[str, Any]) -> dict[str, Any]:
    """Import torch, check that it sees the planned device and no other, join the process group."""
    import torch

    torch.set_num_threads(boot["threads"])
    cpu = boot["device"] == "cpu"
    # Asking for the count initialises nothing on CPU builds and only this rank's device elsewhere.
    count = torch.cuda.device_count()
    if count != (0 if cpu else 1):
        raise RuntimeError(
            f"the plan gives this rank {boot['device']}, torch sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
    device = "cpu"
    if not cpu:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        device = _seen(str(torch.cuda.get_device_properties(0).uuid), boot)
        if device != boot["device"]:
            raise RuntimeError(f"the plan gives this rank {boot['device']}, torch sees {device}")
    world_size = 1
    if boot["world_size"] > 1:
        import torch.distributed as dist

        dist.init_process_group(
            # NCCL does not run on MIG instances (github.com/NVIDIA/nccl, issue 431).
            "gloo" if cpu or boot["device"].startswith("MIG-") else "nccl",
            store=dist.FileStore(boot["rendezvous"], boot["world_size"]),
            rank=boot["rank"],
            world_size=boot["world_size"],
        )
        dist.barrier()
        world_size = dist.get_world_size()
    return {
        "framework": f"torch {torch.__version__}",
        "world_size": world_size,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _seen(uuid: str, boot: dict[str, Any]) -> str:
    """The device that CUDA calls by this UUID, named as in plans.

    Of a MIG instance some versions of CUDA give its own UUID and some that of its board.
    """
    names = [f"{prefix}{uuid}" for prefix in ("GPU-", "MIG-")]
    planned = str(boot["device"])
    if planned in names or (planned.startswith("MIG-") and names[0] in boot["divided"]):
        return planned
    return names[0]


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process with its parent, also when that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
