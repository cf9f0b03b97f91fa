# SPDX-License-Identifier: Apache-2.0
"""From what a test asks for to the devices it may have, or the reason why it may not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.devices import visibility
from pytest_llenergy.devices.inventory import boards as present_boards
from pytest_llenergy.devices.lease import CPU, Lease
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
    Raises ``DeviceError`` with the reason when there are fewer GPUs than asked for and no fallback.
    """
    if request is None:
        return Lease(devices=(CPU,))
    present = present_boards()
    allowed, why_not = _allowed(present, selection, environment)
    fitting = [uuid for uuid in allowed if _fits(request, _find(present, uuid))]
    if len(fitting) >= request.n:
        chosen = tuple(_find(present, uuid) for uuid in fitting[: request.n])
        indices = tuple(present.index(board) for board in chosen)
        return Lease(devices=tuple(board.uuid for board in chosen), boards=chosen, indices=indices)
    if request.fallback == CPU:
        return Lease(devices=(CPU,) * request.n, fallback=CPU)
    raise DeviceError(f"gpus({request.n}): {why_not or _shortage(request, len(fitting), len(present))}")


def _allowed(
    present: Sequence[Board], selection: str | None, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], str | None]:
    uuids = [board.uuid for board in present]
    if selection is not None:
        return visibility.choose(selection, uuids), None
    allowed = visibility.visible_uuids(environment, uuids)
    hidden = visibility.VARIABLE in environment and present and not allowed
    return allowed, visibility.why_hidden(environment, len(present)) if hidden else None


def _find(present: Sequence[Board], uuid: str) -> Board:
    return next(board for board in present if board.uuid == uuid)


def _fits(request: GpuRequest, board: Board) -> bool:
    return request.name is None or request.name.lower() in board.name.lower()


def _shortage(request: GpuRequest, fitting: int, present: int) -> str:
    if present == 0:
        return "this host has no NVIDIA GPU (NVML shows none)"
    named = f" named {request.name!r}" if request.name else ""
    return f"only {fitting}{named} of {present} GPUs may be used here"
