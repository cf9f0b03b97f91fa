# SPDX-License-Identifier: Apache-2.0
"""The steps from a bare process to ranks that talk to each other, and what came of them, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_llenergy.doctor.advice import advice

PROCESS, NVML, DRIVER, TORCH, COUNT = "process", "NVML", "driver", "import torch", "count"
ALLOCATION, MATMUL, GLOO, NCCL = "allocation", "matmul", "two ranks with gloo", "NCCL"
#: On a GPU torch convolves with cuDNN; on the CPU with what the build has.
CONVOLUTION, CUDNN = "convolution", "cuDNN convolution"

#: Steps that a host without a GPU has no use for, and steps that take processes of their own.
OF_GPUS = (NVML, DRIVER, COUNT, NCCL)
OF_RANKS = (GLOO, NCCL)
#: Steps that fail on every device of a host if they fail on one.
OF_HOST = (PROCESS, DRIVER, TORCH)

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
            return "; ".join(filter(None, (told, versions, advice(failed.name, failed.detail, known))))
        if self.untried is not None:
            return f"no step was tried on {self.where}: {self.untried}"
        done = ", ".join(step.name for step in self.steps if step.state == "ok")
        return f"in order on {self.where}: {done}; {versions}"
