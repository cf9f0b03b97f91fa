# SPDX-License-Identifier: Apache-2.0
"""From what a test asks for to the devices it may have, or the reason why it may not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_llenergy.devices.grammar import Visible
from pytest_llenergy.devices.inventory import Present, present
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.mig import one_process
from pytest_llenergy.devices.selection import choose
from pytest_llenergy.devices.visibility import VARIABLE, slurm, visible, why_hidden
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board


@dataclass(frozen=True)
class GpuRequest:
    """``n`` GPUs; ``name`` is a part of the product name; ``fallback="cpu"`` allows CPU ranks."""

    n: int = 1
    name: str | None = None
    fallback: str | None = None


def allot(
    request: GpuRequest | None,
    selection: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Lease:
    """Choose devices. Without a request the test has the CPU, as one rank.

    ``selection`` is the value of ``--energy-gpus``; without it the environment's own allotment counts.
    A MIG instance is leased as a GPU of its own. Raises ``DeviceError`` with the reason when there are fewer
    GPUs than asked for and no fallback, and for a list that names none or cannot be understood.
    """
    if request is None:
        return Lease(devices=(CPU,))
    found = present()
    allowed = _allowed(found, selection, environment)
    devices = {uuid: found.device(uuid) for uuid in allowed.uuids}
    fitting = [uuid for uuid, device in devices.items() if _fits(request, device)]
    if len(fitting) >= request.n:
        chosen = tuple(fitting[: request.n])
        return Lease(
            devices=chosen,
            boards=tuple(devices[uuid] for uuid in chosen),
            indices=tuple(found.index(uuid) for uuid in chosen),
            divided=tuple(dict.fromkeys(part.board for uuid in chosen if (part := found.instance(uuid)))),
        )
    if request.fallback == CPU:
        return Lease(devices=(CPU,) * request.n, fallback=CPU)
    hidden = allowed.reason if found.boards and not allowed.uuids else None
    raise DeviceError(f"gpus({request.n}): {hidden or _shortage(request, len(fitting), found, allowed)}")


def _allowed(found: Present, selection: str | None, environment: Mapping[str, str]) -> Visible:
    """The devices that may be leased, and why these are fewer than the host has."""
    said = slurm(environment)
    if selection is not None:
        return _leasable(choose(selection, found), found, said)
    seen = visible(environment, found)
    if found.boards and not seen.uuids:
        return Visible((), why_hidden(environment, len(found.boards), seen.reason))
    cut = f"{VARIABLE}={environment[VARIABLE]!r}: {seen.reason}" if seen.reason else None
    return _leasable(seen.uuids, found, cut, said)


def _leasable(uuids: tuple[str, ...], found: Present, *reasons: str | None) -> Visible:
    """These devices without the boards that MIG divides, or the instances where all of them are divided.

    CUDA shows instances and never the whole of such a board. Instances that nobody named are not mixed with
    boards: tests would get either, and their energies do not compare.
    """
    divided = [uuid for uuid in uuids if found.parts(uuid)]
    parts = [part for uuid in divided for part in found.parts(uuid)]
    names = ",".join(part.uuid for part in parts)
    told = f"{len(divided)} divided by MIG; name instances with --energy-gpus={names}" if divided else None
    allowed = tuple(uuid for uuid in uuids if uuid not in divided)
    if not allowed:
        allowed = tuple(part.uuid for part in one_process(parts, found.driver))
    return Visible(allowed, "; ".join(filter(None, (*reasons, told))) or None)


def _fits(request: GpuRequest, device: Board) -> bool:
    return request.name is None or request.name.lower() in device.name.lower()


def _shortage(request: GpuRequest, fitting: int, found: Present, allowed: Visible) -> str:
    if not found.boards:
        return "this host has no NVIDIA GPU (NVML shows none)"
    named = f" named {request.name!r}" if request.name else ""
    told = f" ({allowed.reason})" if allowed.reason else ""
    return f"only {fitting}{named} of {len(found.boards)} GPUs may be used here{told}"
