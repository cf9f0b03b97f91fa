# SPDX-License-Identifier: Apache-2.0
"""Describe board, driver and versions without initialising CUDA in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.devices.inventory import read_inventory
from pytest_llenergy.devices.nvml import Quantity, Session, read_or_none
from pytest_llenergy.devices.visibility import parse_visible_devices
from pytest_llenergy.energy.meters.nvml import COUNTERS, POWERS
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.report.provenance import collect_source

from .results import Gpu, Machine

ROOT = Path(__file__).resolve().parents[2]

#: Quantities that no meter uses and that are only inspected.
AVERAGE = Quantity("NVML_FI_DEV_POWER_AVERAGE", field=(185, 0))
INSTANT = Quantity("NVML_FI_DEV_POWER_INSTANT", field=(186, 0))

#: Cached answer of an earlier process about CUDA: the value of ``Machine.cuda``, or empty.
CUDA_VARIABLE = "LLENERGY_VALIDATION_CUDA"

_ASK_TORCH = """
import json, torch
usable = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "usable": usable,
    "cudnn": str(torch.backends.cudnn.version()) if usable else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable and torch.distributed.is_nccl_available()
        else None,
}))
"""


def first_gpu() -> tuple[str | None, str]:
    """Return the UUID of the first board that the environment allows, or None and the reason."""
    try:
        found = read_inventory()
        allowed = parse_visible_devices(os.environ, found)
    except DeviceError as error:
        return None, str(error)
    whole = [uuid for uuid in allowed.uuids if uuid in found.uuids and not found.board_instances(uuid)]
    if whole:
        return whole[0], ""
    return None, found.driver_missing or allowed.reason or "no whole board is visible"


def describe_machine() -> Machine:
    """Describe this machine."""
    uuid, missing = first_gpu()
    torch = query_torch()
    return Machine(
        environment=collect_environment(),
        source=collect_source(ROOT),
        gpu=describe_gpu(uuid) if uuid is not None else None,
        gpu_missing=missing or None,
        cuda=why_no_cuda(torch),
        versions={name: value for name, value in torch.items() if isinstance(value, str) and name != "error"},
    )


def describe_gpu(uuid: str) -> Gpu:
    """Describe one board as its driver reports it."""
    session = Session()
    try:
        board = session.open_board(uuid)
        nvml, handle = session.module, board.handle
        answers = {one.label: session.read(handle, (one,))[0] for one in (*COUNTERS, *POWERS, AVERAGE)}
        version = read_or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        capability = read_or_none(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        memory = read_or_none(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        limit = read_or_none(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
        mig = read_or_none(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        persistence = read_or_none(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
        return Gpu(
            uuid=uuid,
            name=board.name,
            driver=read_or_none(nvml, lambda: str(nvml.nvmlSystemGetDriverVersion())),
            driver_cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            vbios=read_or_none(nvml, lambda: str(nvml.nvmlDeviceGetVbiosVersion(handle))),
            power_limit_w=limit,
            memory_bytes=memory,
            compute_capability=None if capability is None else ".".join(map(str, capability)),
            mig_enabled=bool(mig),
            persistence=None if persistence is None else bool(persistence),
            clocks_mhz=_clocks(nvml, handle),
            sources=[label for label, answer in answers.items() if not isinstance(answer, str)],
            refused={label: answer for label, answer in answers.items() if isinstance(answer, str)},
        )
    finally:
        session.close()


def _clocks(nvml: Any, handle: Any) -> dict[str, int]:
    kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    found = {}
    for name, kind in kinds.items():
        for what, ask in (("now", nvml.nvmlDeviceGetClockInfo), ("max", nvml.nvmlDeviceGetMaxClockInfo)):
            value = read_or_none(nvml, lambda ask=ask, kind=kind: int(ask(handle, kind)))  # type: ignore[misc]
            if value is not None:
                found[f"{name}_{what}"] = value
    return found


def query_torch() -> dict[str, Any]:
    """Return torch's versions and whether it can use CUDA, queried in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "torch did not report within 60 s whether it can use CUDA"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def why_no_cuda(torch: dict[str, Any]) -> str | None:
    """Return the reason why torch cannot use CUDA, or None if it can."""
    if "error" in torch:
        return str(torch["error"])
    if not torch["cuda"]:
        return f"torch {torch['torch']} is a build without CUDA"
    return None if torch["usable"] else f"torch {torch['torch']} finds no usable GPU"


def cuda_missing() -> str | None:
    """Return the reason why a part that needs CUDA cannot run, or None; queried once per validation."""
    if CUDA_VARIABLE not in os.environ:
        os.environ[CUDA_VARIABLE] = why_no_cuda(query_torch()) or ""
    return os.environ[CUDA_VARIABLE] or None


def nvml_missing() -> str | None:
    """Return the reason why no board can be read, or None."""
    try:
        Session().close()
    except (NoDriverError, DeviceError) as error:
        return str(error)
    uuid, why = first_gpu()
    return None if uuid is not None else why
