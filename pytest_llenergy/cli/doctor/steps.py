# SPDX-License-Identifier: Apache-2.0
"""What ``llenergy doctor`` checks on a device: the steps in order, their results, and advice for failures.

``trial`` runs them, and ``probe`` has the code of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Names of the steps.
PROCESS, NVML, DRIVER, TORCH, COUNT = "process", "NVML", "driver", "import torch", "count"
ALLOCATION, MATMUL, GLOO, NCCL = "allocation", "matmul", "two ranks with gloo", "NCCL"
#: On a GPU torch uses cuDNN; on the CPU whatever the build has.
CONVOLUTION, CUDNN = "convolution", "cuDNN convolution"

#: Steps that need a GPU, and steps that start several processes.
GPU_STEPS = (NVML, DRIVER, COUNT, NCCL)
RANK_STEPS = (GLOO, NCCL)
#: Steps that, if they fail on one device, fail on every device of the host.
HOST_STEPS = (PROCESS, DRIVER, TORCH)

#: The steps of one process in order; each needs those before it. A convolution follows (``list_steps``).
SINGLE_PROCESS_STEPS = (PROCESS, NVML, DRIVER, TORCH, COUNT, ALLOCATION, MATMUL)

#: Time of one step, by default. Importing torch from a cold network disk takes longest.
STEP_TIMEOUT_S = 120.0
#: Time of all steps in a test whose ranks failed to start: shorter, since the run waits for it.
TEST_TRIAL_TIMEOUT_S = 60.0

#: Advice by a word in the detail of a failed step. For the names and meanings of CUDA errors see cuda.h,
#: ``cudaError_enum``.
ADVICE_BY_WORD = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda.so.1 and the kernel module are of different drivers: restart the host after an update, and "
        "remove any other libcuda.so.1 (cuda-compat) from LD_LIBRARY_PATH"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "remove the libcuda.so.1 of cuda-compat from LD_LIBRARY_PATH; this board has no forward compatibility"
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, or wait until it is ready",
    "CUDA_ERROR_UNKNOWN": (
        "reload the module nvidia_uvm (modprobe -r nvidia_uvm; modprobe nvidia_uvm), or restart the host; "
        "under WSL2, wsl --shutdown"
    ),
    "CUDA_ERROR_NO_DEVICE": "see nvidia-smi -L, and whether this user may open /dev/nvidia*",
    "libcuda.so.1": (
        "install the driver's CUDA library; in a container, start it with --gpus all and "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ),
    "no kernel image": "install a torch that was built for this board's compute capability",
    "out of memory": "nvidia-smi shows which processes use the memory",
    "built without CUDA": "install a torch that is built with CUDA (https://pytorch.org/get-started)",
    "Argument list too long": "unset variables that are not needed; each must be smaller than 128 KiB",
    "SIGILL": "a library was built for another CPU: reinstall it for this one; lscpu lists what it has",
    "SIGKILL": "see the kernel's log (dmesg) for the out-of-memory killer",
    "SIGBUS": "check whether /dev/shm is full",
}

#: Advice by the failed step, if no word matches.
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
    "two ranks with gloo": "check whether the loopback interface is up, and which firewall rules apply to it",
    "NCCL": "NCCL_DEBUG=INFO says more; make sure that /dev/shm is large enough (docker run --shm-size)",
}

#: Steps that can fail because the CUDA runtime of torch does not match the driver.
CUDA_STEPS = ("count", "allocation", "matmul", "cuDNN convolution", "NCCL")

#: How a message shows each version, in this order.
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


def list_steps(device: str | None, ranks: bool) -> tuple[str, ...]:
    """Return the names of the steps on a device, in order.

    Args:
        device: Full UUID, or None for the CPU.
        ranks: Whether to include the steps of several processes.
    """
    convolution = CONVOLUTION if device is None else CUDNN
    return (*SINGLE_PROCESS_STEPS, convolution, *(RANK_STEPS if ranks else ()))


def advise(step: str, detail: str, versions: Mapping[str, str]) -> str:
    """Return what to do about a failed step, by its versions and detail, or else by its name.

    Args:
        step: Name of the failed step.
        detail: How it failed.
        versions: Versions found so far, by the keys of ``VERSIONS``.
    """
    remedy = next(
        (text for word, text in ADVICE_BY_WORD.items() if word in detail), ADVICE_BY_STEP.get(step, "")
    )
    return "; ".join(filter(None, (_mismatch(versions) if step in CUDA_STEPS else "", remedy)))


def _mismatch(versions: Mapping[str, str]) -> str:
    """Return advice if the runtime has another major version than the driver.

    A newer runtime does not run; an older one should.
    """
    driver, runtime = versions.get("driver_cuda"), versions.get("torch_cuda")
    if not driver or not runtime or _major(driver) == _major(runtime):
        return ""
    if _major(runtime) > _major(driver):
        return f"update the driver, or install a torch that is built for CUDA {_major(driver)}"
    return f"try a torch that is built for CUDA {_major(driver)}, as the driver is"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


@dataclass(frozen=True)
class Step:
    """Result of one step.

    Attributes:
        name: One of the step names.
        state: How it ended.
        detail: What it found, how it failed, or why it was skipped.
        duration_s: Duration in seconds; None for a step that did not start.
        versions: Versions that it found, by the keys of ``VERSIONS``.
    """

    name: str
    state: State
    detail: str = ""
    duration_s: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """All steps on one device.

    Attributes:
        device: Full UUID, or None for the CPU.
        steps: Results in order.
        output: Last lines that the process of a failed step wrote.
    """

    device: str | None
    steps: tuple[Step, ...]
    output: tuple[str, ...] = ()

    @property
    def first_failure(self) -> Step | None:
        """The step that names the fault, or None."""
        return next((step for step in self.steps if step.state == "failed"), None)

    @property
    def not_run_reason(self) -> str | None:
        """Why no step was started; None if one was."""
        started = any(step.state != "skipped" for step in self.steps)
        return None if started or not self.steps else self.steps[0].detail

    @property
    def duration_s(self) -> float:
        """Duration of all steps in seconds."""
        return sum(step.duration_s or 0.0 for step in self.steps)

    @property
    def versions(self) -> Mapping[str, str]:
        """Every version that a step found."""
        return {name: version for step in self.steps for name, version in step.versions.items()}

    @property
    def device_name(self) -> str:
        """Name of the device for messages."""
        return self.device or "the CPU"

    @property
    def summary(self) -> str:
        """One line: which step failed and how, the versions, and what to do."""
        known = self.versions
        versions = ", ".join(text.format(known[name]) for name, text in VERSIONS.items() if name in known)
        failed = self.first_failure
        if failed is not None:
            failure = f"the step {failed.name!r} failed on {self.device_name}: {failed.detail}"
            return "; ".join(filter(None, (failure, versions, advise(failed.name, failed.detail, known))))
        if self.not_run_reason is not None:
            return f"no step ran on {self.device_name}: {self.not_run_reason}"
        done = ", ".join(step.name for step in self.steps if step.state == "ok")
        return f"no fault on {self.device_name}: {done}; {versions}"
