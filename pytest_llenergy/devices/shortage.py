# SPDX-License-Identifier: Apache-2.0
"""Why there are fewer GPUs than a test asks for, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_llenergy.devices.inventory import Present
from pytest_llenergy.devices.request import GpuRequest, show_memory
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

NONE_HERE = "this host has no NVIDIA GPU"


class ShortageError(DeviceError):
    """Fewer GPUs than asked for, or all hidden by the environment: a reason to skip, and no fault.

    What cannot be understood, or does not answer, is another ``DeviceError``.
    """


def explain(
    request: GpuRequest,
    fitting: Sequence[str],
    allowed: Sequence[str],
    reason: str | None,
    found: Present,
) -> str:
    """What was asked, how many fit, why the others do not.

    ``allowed`` may be leased, ``reason`` is why these are not all; ``fitting`` are those of them that fit.
    """
    if not found.boards:
        return f"{request}: {NONE_HERE} ({found.missing or 'NVML shows none'})"
    told = f" ({reason})" if reason else ""
    if request.mig is not None and not allowed:
        return (
            f"{request}: there is no MIG instance here{told}; nvidia-smi mig -cgi {request.mig} -C makes one "
            "on a board in MIG mode"
        )
    what = "MIG instances" if request.mig is not None else "GPUs"
    total = len(found.instances) if request.mig is not None else len(found.boards) + len(found.lost)
    if len(fitting) == len(allowed):
        return f"{request}: only {len(fitting)} of {total} {what} may be used here{told}"
    others = "; ".join(filter(None, (_others(request, fitting, allowed, found), reason)))
    return f"{request}: only {len(fitting)} of {len(allowed)} {what} fit (others: {others})"


def _others(request: GpuRequest, fitting: Sequence[str], allowed: Sequence[str], found: Present) -> str:
    lacking = [_lacks(request, found.device(uuid), found) for uuid in allowed if uuid not in fitting]
    return ", ".join(f"{n} × {text}" if n > 1 else text for text, n in Counter(lacking).items())


def _lacks(request: GpuRequest, device: Board, found: Present) -> str:
    """What this device is instead of what was asked for."""
    if not has_name(request, device):
        return device.name
    if not has_profile(request, device, found):
        part = found.instance(device.uuid)
        return (part.profile if part is not None else None) or "unknown profile"
    return show_memory(device.memory_bytes, request.memory_unit)


def fits(request: GpuRequest, device: Board, found: Present) -> bool:
    """Whether a device is what was asked for. Memory that is not told is not enough."""
    return (
        has_name(request, device)
        and has_profile(request, device, found)
        and (request.memory is None or (device.memory_bytes or 0) >= request.memory_bytes)
    )


def has_name(request: GpuRequest, device: Board) -> bool:
    """Whether the name is a part of the product name."""
    return request.name is None or request.name.lower() in device.name.lower()


def has_profile(request: GpuRequest, device: Board, found: Present) -> bool:
    """Whether the device is an instance of the profile, where one is asked for."""
    if request.mig is None:
        return True
    part = found.instance(device.uuid)
    return part is not None and part.profile == request.mig.lower()
