# SPDX-License-Identifier: Apache-2.0
"""Script that runs one step after the other in a fresh interpreter and reports each result.

It uses only the standard library and runs as a script, so that nothing is imported before the environment is
set. It writes one JSON line for each finished step before it starts the next, so a process that dies or hangs
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

#: Side of the square matrices, and bytes to allocate: enough to use every library, and little enough for any
#: board.
SIDE = 256
ALLOCATED_BYTES = 64 * 2**20
#: Integers up to this size multiply and add exactly in every format that a GPU may choose.
LARGEST = 8
#: A message of torch may fill a page; its first line is enough.
MAX_CHARACTERS = 400


class Fault(Exception):  # noqa: N818 - reported without the name of the class
    """The step failed; the message says how."""


class Skip(Exception):  # noqa: N818 - not an error
    """The step and those after it do not apply here."""


@dataclass
class StepContext:
    """What the steps share: the request, names that CUDA may use for the device, and where to report."""

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
        """Device type in torch."""
        return "cpu" if self.device is None else "cuda"

    def report_versions(self, **versions: str) -> None:
        """Report versions at once: the step that finds them may be the one that dies."""
        self.write_line(state="running", versions=versions)

    def write_line(self, **line: object) -> None:
        os.write(self.report, f"{json.dumps(line)}\n".encode())


def process(context: StepContext) -> str:
    kernel = platform.release()
    if "microsoft" in kernel.lower():
        context.report_versions(wsl=kernel)
    context.report_versions(python=platform.python_version())
    return sys.executable


def nvml(context: StepContext) -> str:
    from pytest_llenergy.devices.nvml import Session

    session = Session()
    try:
        context.report_versions(driver=str(session.module.nvmlSystemGetDriverVersion()))
        board = session.open_board(str(context.device))
        # For a MIG instance, some versions of CUDA report its own UUID and some that of its board.
        context.names.add(board.uuid)
        return board.name
    finally:
        session.close()


def driver(context: StepContext) -> str:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Fault(str(error)) from None
    result = cuda.cuInit(0)
    version = ctypes.c_int()
    if not cuda.cuDriverGetVersion(ctypes.byref(version)) and version.value:
        # 1000 * major + 10 * minor (cuda.h).
        context.report_versions(driver_cuda=f"{version.value // 1000}.{version.value % 1000 // 10}")
    if result:
        raise Fault(f"cuInit: {_describe_cuda_error(cuda, result)}")
    return "cuInit"


def _describe_cuda_error(cuda: ctypes.CDLL, result: int) -> str:
    words = []
    for function in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        text = ctypes.c_char_p()
        if not function(result, ctypes.byref(text)) and text.value:
            words.append(text.value.decode(errors="replace"))
    return " ".join((words[0], f"({', '.join((str(result), *words[1:]))})")) if words else f"error {result}"


def import_torch(context: StepContext) -> str:
    from importlib.util import find_spec

    if "torch" in sys.modules:
        raise Fault("torch was imported before its devices could be set (sitecustomize or .pth?)")
    if find_spec("torch") is None:
        raise Skip("torch is not installed")
    import torch

    context.report_versions(torch=str(torch.__version__))
    if torch.version.cuda:
        context.report_versions(torch_cuda=str(torch.version.cuda))
    return str(torch.__file__)


def count(context: StepContext) -> str:
    import torch

    if not torch.version.cuda:
        raise Fault(f"torch {torch.__version__} is built without CUDA")
    seen = torch.cuda.device_count()
    if seen != 1:
        raise Fault(f"torch sees {seen} GPUs with CUDA_VISIBLE_DEVICES={context.device}")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    names = {f"GPU-{uuid}", f"MIG-{uuid}"}
    if names.isdisjoint({*context.names, context.device}):
        raise Fault(f"torch sees GPU-{uuid} with CUDA_VISIBLE_DEVICES={context.device}")
    return "the requested one"


def allocation(context: StepContext) -> str:
    import torch

    ones = torch.ones(ALLOCATED_BYTES, dtype=torch.uint8, device=context.place)
    total = int(ones.sum(dtype=torch.int64).item())
    if total != ALLOCATED_BYTES:
        raise Fault(f"{ALLOCATED_BYTES} bytes of 1 were written, and their sum is {total}")
    return f"{ALLOCATED_BYTES >> 20} MiB"


def matmul(context: StepContext) -> str:
    left, right = _random_integers(SIDE, SIDE), _random_integers(SIDE, SIDE)
    found = left.float().to(context.place) @ right.float().to(context.place)
    # torch multiplies integers in its own loops, so the expected result does not depend on the tested
    # library.
    _compare(found, left @ right)
    return f"{SIDE} x {SIDE}, exact"


def convolution(context: StepContext) -> str:
    import torch

    backend = "torch's own"
    if context.place != "cpu":
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        if cudnn is None:
            raise Fault(f"torch {torch.__version__} has no cuDNN")
        # cudnn_version.h: 10000 * major + 100 * minor + patch since 9, thousands before.
        thousand = 10_000 if cudnn >= 90_000 else 1000
        context.report_versions(cudnn=f"{cudnn // thousand}.{cudnn % thousand // 100}.{cudnn % 100}")
        backend = "cuDNN"
    images, weights = _random_integers(2, 8, 32, 32), _random_integers(16, 8, 3, 3)
    found = torch.nn.functional.conv2d(images.float().to(context.place), weights.float().to(context.place))
    patches = images.unfold(2, 3, 1).unfold(3, 3, 1).unsqueeze(1)
    _compare(found, (patches * weights[None, :, :, None, None]).sum((2, 5, 6)))
    return f"by {backend}, all results correct"


def gloo(context: StepContext) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise Skip("torch is built without gloo")
    _all_reduce(context, "gloo", torch.ones(1))
    return f"over {os.environ['GLOO_SOCKET_IFNAME']}"


def nccl(context: StepContext) -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        raise Skip("torch is built without NCCL")
    context.report_versions(nccl=".".join(map(str, torch.cuda.nccl.version())))
    torch.cuda.set_device(0)
    _all_reduce(context, "nccl", torch.ones(1).to("cuda"))
    return "two ranks" if context.request["world_size"] > 1 else "one rank, on a single GPU"


def _all_reduce(context: StepContext, backend: str, tensor: Any) -> None:
    import torch.distributed as dist

    rank, n = context.request["rank"], context.request["world_size"]
    store = dist.FileStore(context.request["rendezvous"], n)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n)
    tensor *= rank + 1
    dist.all_reduce(tensor)
    expected = n * (n + 1) // 2
    if tensor.item() != expected:
        raise Fault(f"the sum over {n} ranks is {tensor.item():g} and not {expected}")
    # A rank that leaves early closes the connection of the other.
    dist.barrier()


def _random_integers(*shape: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator)


def _compare(found: Any, expected: Any) -> None:
    # Some convolution algorithms have a small rounding error.
    wrong = int((found.cpu().round().long() != expected).sum())
    if wrong:
        raise Fault(f"{wrong} of {expected.numel()} results are wrong")


STEPS: dict[str, Callable[[StepContext], str]] = {
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
#: Steps of a single process.
ON_CPU = ("process", "import torch", "allocation", "matmul", "convolution")
ON_GPU = ("process", "NVML", "driver", "import torch", "count", "allocation", "matmul", "cuDNN convolution")


def main(argument: str) -> None:
    """Run the requested steps, then end the process: exit code 1 if a step failed."""
    request: dict[str, Any] = json.loads(argument)
    device = request.setdefault("device", None)
    _disable_core_dumps()
    faulthandler.enable()
    os.environ.update(CUDA_VISIBLE_DEVICES=device or "", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    # The first element is the folder of this file.
    sys.path[:] = request.get("sys_path", sys.path[1:])
    report = request.get("report", 1)
    if report != 1:
        os.set_inheritable(report, False)
    context = StepContext(request, report)
    for name in request.get("steps", ON_GPU if device else ON_CPU):
        _run_step(context, name)
    _end(0)


def _run_step(context: StepContext, name: str) -> None:
    start_s = time.monotonic()
    state, detail = "ok", ""
    try:
        detail = STEPS[name](context)
    except Skip as skip:
        state, detail = "skipped", str(skip)
    except Fault as fault:
        state, detail = "failed", _first_line(str(fault))
    except BaseException as error:
        state, detail = "failed", _first_line(_describe(error))
        sys.excepthook(type(error), error, error.__traceback__)
    context.write_line(step=name, state=state, detail=detail, duration_s=time.monotonic() - start_s)
    if state != "ok":
        _end(state == "failed")


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    if type(error).__module__.startswith("pytest_llenergy."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip().encode(errors="replace").decode()
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


def _disable_core_dumps() -> None:
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _end(code: int) -> None:
    # Skip what torch does when the interpreter exits: it is not part of a step.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "{}")
