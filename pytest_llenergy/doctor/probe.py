# SPDX-License-Identifier: Apache-2.0
"""Entry of a fresh interpreter that takes one step after the other and says of each how it went.

Standard library only, and run as a script, so that nothing can be imported before the environment is set.
It writes one JSON line for each step that is done, before it begins the next: a process that dies or hangs
did so in the step whose line is missing. By hand: ``python probe.py '{"device": "GPU-…"}'``, or without an
argument for the CPU.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: Side of the square matrices, and how many bytes are allocated: enough to reach every library, on any board.
SIDE = 256
ALLOCATED_BYTES = 64 * 2**20
#: Whole numbers up to this size multiply and add exactly in every format that a GPU may choose.
LARGEST = 8
#: A message of torch may be a page; its first line says what it is.
MOST_CHARACTERS = 400


class Fault(Exception):  # noqa: N818 - it is the step's, told without the name of a class
    """The step failed, and this is how."""


class Skip(Exception):  # noqa: N818 - it is no error
    """The step and those after it make no sense here."""


@dataclass
class Scene:
    """What the steps share. ``names`` is what CUDA may call the device, ``report`` where lines go."""

    request: dict[str, Any]
    report: int
    names: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str | None:
        device: str | None = self.request["device"]
        return device

    @property
    def place(self) -> str:
        """The device as torch calls it."""
        return "cpu" if self.device is None else "cuda"

    def know(self, **versions: str) -> None:
        """Say versions at once: the step that comes to know them may be the one that dies."""
        self.say(state="running", versions=versions)

    def say(self, **line: object) -> None:
        os.write(self.report, f"{json.dumps(line)}\n".encode())


def process(scene: Scene) -> str:
    kernel = platform.release()
    if "microsoft" in kernel.lower():
        scene.know(wsl=kernel)
    scene.know(python=platform.python_version())
    return sys.executable


def nvml(scene: Scene) -> str:
    from pytest_llenergy.devices.nvml import Session

    session = Session()
    try:
        scene.know(driver=str(session.module.nvmlSystemGetDriverVersion()))
        board = session.open_board(str(scene.device))
        # Of a MIG instance some versions of CUDA give its own UUID and some that of its board.
        scene.names.add(board.uuid)
        return board.name
    finally:
        session.close()


def driver(scene: Scene) -> str:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Fault(str(error)) from None
    result = cuda.cuInit(0)
    version = ctypes.c_int()
    if not cuda.cuDriverGetVersion(ctypes.byref(version)) and version.value:
        # 1000 * major + 10 * minor (cuda.h).
        scene.know(driver_cuda=f"{version.value // 1000}.{version.value % 1000 // 10}")
    if result:
        raise Fault(f"cuInit: {_cuda_says(cuda, result)}")
    return "cuInit"


def _cuda_says(cuda: ctypes.CDLL, result: int) -> str:
    words = []
    for function in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        text = ctypes.c_char_p()
        if not function(result, ctypes.byref(text)) and text.value:
            words.append(text.value.decode(errors="replace"))
    return " ".join((words[0], f"({', '.join((str(result), *words[1:]))})")) if words else f"error {result}"


def import_torch(scene: Scene) -> str:
    from importlib.util import find_spec

    if "torch" in sys.modules:
        raise Fault("torch was imported before its devices could be set (sitecustomize or .pth?)")
    if find_spec("torch") is None:
        raise Skip("torch is not installed")
    import torch

    scene.know(torch=str(torch.__version__))
    if torch.version.cuda:
        scene.know(torch_cuda=str(torch.version.cuda))
    return str(torch.__file__)


def count(scene: Scene) -> str:
    import torch

    if not torch.version.cuda:
        raise Fault(f"torch {torch.__version__} is built without CUDA")
    seen = torch.cuda.device_count()
    if seen != 1:
        raise Fault(f"torch sees {seen} GPUs with CUDA_VISIBLE_DEVICES={scene.device}")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    names = {f"GPU-{uuid}", f"MIG-{uuid}"}
    if names.isdisjoint({*scene.names, scene.device}):
        raise Fault(f"torch sees GPU-{uuid} with CUDA_VISIBLE_DEVICES={scene.device}")
    return "the one that was asked for"


def allocation(scene: Scene) -> str:
    import torch

    ones = torch.ones(ALLOCATED_BYTES, dtype=torch.uint8, device=scene.place)
    total = int(ones.sum(dtype=torch.int64).item())
    if total != ALLOCATED_BYTES:
        raise Fault(f"{ALLOCATED_BYTES} bytes of 1 were written and add up to {total}")
    return f"{ALLOCATED_BYTES >> 20} MiB"


def matmul(scene: Scene) -> str:
    left, right = _whole_numbers(SIDE, SIDE), _whole_numbers(SIDE, SIDE)
    found = left.float().to(scene.place) @ right.float().to(scene.place)
    # Integers are multiplied by torch's own loops: the libraries under test have no part in what is expected.
    _compare(found, left @ right)
    return f"{SIDE} x {SIDE}, right to the last digit"


def convolution(scene: Scene) -> str:
    import torch

    backend = "torch's own"
    if scene.place != "cpu":
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        if cudnn is None:
            raise Fault(f"torch {torch.__version__} has no cuDNN")
        # cudnn_version.h: 10000 * major + 100 * minor + patch since 9, thousands before.
        thousand = 10_000 if cudnn >= 90_000 else 1000
        scene.know(cudnn=f"{cudnn // thousand}.{cudnn % thousand // 100}.{cudnn % 100}")
        backend = "cuDNN"
    images, weights = _whole_numbers(2, 8, 32, 32), _whole_numbers(16, 8, 3, 3)
    found = torch.nn.functional.conv2d(images.float().to(scene.place), weights.float().to(scene.place))
    patches = images.unfold(2, 3, 1).unfold(3, 3, 1).unsqueeze(1)
    _compare(found, (patches * weights[None, :, :, None, None]).sum((2, 5, 6)))
    return f"by {backend}, all results right"


def gloo(scene: Scene) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise Skip("torch is built without gloo")
    _all_reduce(scene, "gloo", torch.ones(1))
    return f"over {os.environ['GLOO_SOCKET_IFNAME']}"


def nccl(scene: Scene) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        raise Skip("torch is built without NCCL")
    scene.know(nccl=".".join(map(str, torch.cuda.nccl.version())))
    torch.cuda.set_device(0)
    _all_reduce(scene, "nccl", torch.ones(1).to("cuda"))
    return "two ranks" if scene.request["world_size"] > 1 else "one rank, as one GPU is tried"


def _all_reduce(scene: Scene, backend: str, tensor: Any) -> None:
    import torch.distributed as dist

    rank, n = scene.request["rank"], scene.request["world_size"]
    store = dist.FileStore(scene.request["rendezvous"], n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n)
    tensor *= rank + 1
    dist.all_reduce(tensor)
    expected = n * (n + 1) // 2
    if tensor.item() != expected:
        raise Fault(f"the sum over {n} ranks is {tensor.item():g} and should be {expected}")
    # Who leaves early takes the other's connection with it.
    dist.barrier()


def _whole_numbers(*shape: int) -> Any:
    import torch

    chance = torch.Generator().manual_seed(0)
    return torch.randint(-LARGEST, LARGEST + 1, shape, generator=chance)


def _compare(found: Any, expected: Any) -> None:
    # Some algorithms of convolution are exact to a fraction only.
    wrong = int((found.cpu().round().long() != expected).sum())
    if wrong:
        raise Fault(f"{wrong} of {expected.numel()} results are wrong")


STEPS: dict[str, Callable[[Scene], str]] = {
    "process": process,
    "NVML": nvml,
    "driver": driver,
    "import torch": import_torch,
    "count": count,
    "allocation": allocation,
    "matmul": matmul,
    "convolution": convolution,
    "cuDNN convolution": convolution,
    "two ranks with gloo": gloo,
    "NCCL": nccl,
}
#: Those of a single process.
ON_CPU = ("process", "import torch", "allocation", "matmul", "convolution")
ON_GPU = ("process", "NVML", "driver", "import torch", "count", "allocation", "matmul", "cuDNN convolution")


def main(argument: str) -> None:
    """Take the steps that are asked for. Ends the process, with exit code 1 after a step that failed."""
    request: dict[str, Any] = json.loads(argument)
    device = request.setdefault("device", None)
    _leave_no_core()
    faulthandler.enable()
    os.environ.update(CUDA_VISIBLE_DEVICES=device or "", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    # Its first element is this file's folder.
    sys.path[:] = request.get("sys_path", sys.path[1:])
    report = request.get("report", 1)
    if report != 1:
        os.set_inheritable(report, False)
    scene = Scene(request, report)
    for name in request.get("steps", ON_GPU if device else ON_CPU):
        _take(scene, name)
    _end(0)


def _take(scene: Scene, name: str) -> None:
    start_s = time.monotonic()
    state, detail = "ok", ""
    try:
        detail = STEPS[name](scene)
    except Skip as skip:
        state, detail = "skipped", str(skip)
    except Fault as fault:
        state, detail = "failed", _first_line(str(fault))
    except BaseException as error:
        state, detail = "failed", _first_line(_told(error))
        sys.excepthook(type(error), error, error.__traceback__)
    scene.say(step=name, state=state, detail=detail, duration_s=time.monotonic() - start_s)
    if state != "ok":
        _end(state == "failed")


def _told(error: BaseException) -> str:
    text = str(error).strip()
    if type(error).__module__.startswith("pytest_llenergy."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip().encode(errors="replace").decode()
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"


def _leave_no_core() -> None:
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _end(code: int) -> None:
    # What torch does at the end of its interpreter is no step.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "{}")
