# SPDX-License-Identifier: Apache-2.0
"""The steps of the check, and advice for each that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What to do about a step that failed.

#: By what the step said. Names and meanings of CUDA's: cuda.h, ``cudaError_enum``.
ADVICE_BY_WORD = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda.so.1 and the kernel module are of different drivers: restart the host after an update, and "
        "take any other libcuda.so.1 (cuda-compat) off LD_LIBRARY_PATH"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "take the libcuda.so.1 of cuda-compat off LD_LIBRARY_PATH; this board has no forward compatibility"
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, or wait until it is ready",
    "CUDA_ERROR_UNKNOWN": (
        "load the module nvidia_uvm anew (modprobe -r nvidia_uvm; modprobe nvidia_uvm), or restart the host; "
        "under WSL2, wsl --shutdown"
    ),
    "CUDA_ERROR_NO_DEVICE": "see nvidia-smi -L, and whether this user may open /dev/nvidia*",
    "libcuda.so.1": (
        "install the driver's CUDA library; in a container, start it with --gpus all and "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ),
    "no kernel image": "install a torch that was built for this board's compute capability",
    "out of memory": "see nvidia-smi for who has the memory",
    "built without CUDA": "install a torch that is built with CUDA (https://pytorch.org/get-started)",
    "Argument list too long": "unset what is not needed of the environment; no variable may have 128 KiB",
    "SIGILL": "a library was built for another CPU: reinstall it for this one; lscpu lists what it has",
    "SIGKILL": "see the kernel's log (dmesg) for the out-of-memory killer",
    "SIGBUS": "see whether /dev/shm is full",
}

ADVICE_BY_STEP = {
    "process": "see sitecustomize, .pth files and PYTHONSTARTUP of this interpreter",
    "NVML": "see nvidia-smi",
    "driver": "see nvidia-smi, and LD_LIBRARY_PATH for another libcuda.so.1",
    "import torch": "reinstall torch, and see LD_LIBRARY_PATH for another copy of its libraries",
    "count": "see nvidia-smi -L",
    "allocation": "see nvidia-smi for the state of the board",
    "matmul": "reinstall torch with the libraries it names",
    "convolution": "reinstall torch",
    "cuDNN convolution": (
        "a single process fails, so it is not how processes are started: reinstall torch with its own cuDNN, "
        "and see LD_LIBRARY_PATH for another one"
    ),
    "two ranks with gloo": "see whether the loopback interface is up, and what firewall is on it",
    "NCCL": "NCCL_DEBUG=INFO says more; see that /dev/shm is large enough (docker run --shm-size)",
}

#: Where a runtime that does not fit the driver can be what is wrong.
CUDA_STEPS = ("count", "allocation", "matmul", "cuDNN convolution", "NCCL")


def advise(step: str, detail: str, versions: Mapping[str, str]) -> str:
    """What to do, by what the step said, by the versions, or by the step. Empty for an unknown one."""
    told = next(
        (text for word, text in ADVICE_BY_WORD.items() if word in detail), ADVICE_BY_STEP.get(step, "")
    )
    return "; ".join(filter(None, (_mismatch(versions) if step in CUDA_STEPS else "", told)))


def _mismatch(versions: Mapping[str, str]) -> str:
    """A runtime of another major version than the driver's: older ones should run, newer ones do not."""
    driver, runtime = versions.get("driver_cuda"), versions.get("torch_cuda")
    if not driver or not runtime or _major(driver) == _major(runtime):
        return ""
    if _major(runtime) > _major(driver):
        return f"update the driver, or install a torch that is built for CUDA {_major(driver)}"
    return f"try a torch that is built for CUDA {_major(driver)}, as the driver is"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


# The steps from a bare process to ranks that talk to each other, and what came of them, as plain data.

PROCESS, NVML, DRIVER, TORCH, COUNT = "process", "NVML", "driver", "import torch", "count"
ALLOCATION, MATMUL, GLOO, NCCL = "allocation", "matmul", "two ranks with gloo", "NCCL"
#: On a GPU torch convolves with cuDNN; on the CPU with what the build has.
CONVOLUTION, CUDNN = "convolution", "cuDNN convolution"

#: Steps that a host without a GPU has no use for, and steps that take processes of their own.
GPU_STEPS = (NVML, DRIVER, COUNT, NCCL)
RANK_STEPS = (GLOO, NCCL)
#: Steps that fail on every device of a host if they fail on one.
HOST_STEPS = (PROCESS, DRIVER, TORCH)

#: What a sentence calls each version, in its order.
VERSIONS = {
    "driver": "driver {}",
    "driver_cuda": "CUDA {} in the driver",
    "torch": "torch {}",
    "torch_cuda": "CUDA {} in torch",
    "cudnn": "cuDNN {}",
    "nccl": "NCCL {}",
    "python": "Python {}",
    "wsl": "WSL kernel {}",
}

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Step:
    """One step. ``detail`` is what was seen, how it failed, or why it was skipped.

    ``duration_s`` is ``None`` for a step that was not begun. ``versions`` are those that it came to know, by
    the keys of ``VERSIONS``.
    """

    name: str
    state: State
    detail: str = ""
    duration_s: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """All steps on one device: a full UUID, or ``None`` for the CPU.

    ``output`` are the last lines that the process of a failed step wrote.
    """

    device: str | None
    steps: tuple[Step, ...]
    output: tuple[str, ...] = ()

    @property
    def first_failure(self) -> Step | None:
        """The step that names the fault; ``None`` where there is none."""
        return next((step for step in self.steps if step.state == "failed"), None)

    @property
    def untried(self) -> str | None:
        """Why no step was begun; ``None`` if one was."""
        begun = any(step.state != "skipped" for step in self.steps)
        return None if begun or not self.steps else self.steps[0].detail

    @property
    def duration_s(self) -> float:
        """Of all steps together."""
        return sum(step.duration_s or 0.0 for step in self.steps)

    @property
    def versions(self) -> Mapping[str, str]:
        """Every version that a step came to know."""
        return {name: version for step in self.steps for name, version in step.versions.items()}

    @property
    def where(self) -> str:
        """The device, for a sentence."""
        return self.device or "the CPU"

    @property
    def sentence(self) -> str:
        """One line: which step failed and how, the versions that matter, and what to do."""
        known = self.versions
        versions = ", ".join(text.format(known[name]) for name, text in VERSIONS.items() if name in known)
        failed = self.first_failure
        if failed is not None:
            told = f"the step {failed.name!r} failed on {self.where}: {failed.detail}"
            return "; ".join(filter(None, (told, versions, advise(failed.name, failed.detail, known))))
        if self.untried is not None:
            return f"no step was tried on {self.where}: {self.untried}"
        done = ", ".join(step.name for step in self.steps if step.state == "ok")
        return f"in order on {self.where}: {done}; {versions}"
