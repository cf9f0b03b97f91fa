# SPDX-License-Identifier: Apache-2.0
"""From what a test asks for to the devices it may have, or the reason why it may not."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_llenergy.devices.grammar import Visible
from pytest_llenergy.devices.inventory import Present, present
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.mig import EMPTY, one_process
from pytest_llenergy.devices.preference import preferred
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.selection import choose
from pytest_llenergy.devices.shortage import ShortageError, explain, fits
from pytest_llenergy.devices.visibility import VARIABLE, slurm, visible, why_hidden
from pytest_llenergy.errors import DeviceError

__all__ = ["GpuRequest", "allot", "allowed", "every_visible"]


def allot(
    request: GpuRequest | None,
    selection: str | None = None,
    environment: Mapping[str, str] = os.environ,
    warm: Collection[str] = (),
) -> Lease:
    """The devices that a test would have first, and as ``choices`` all that would do, the best first.

    Without a request that is the CPU, as one rank. ``selection`` is the value of ``--energy-gpus``; without
    it the environment's own allotment counts. ``warm`` are UUIDs on which ranks of ours wait for work. A MIG
    instance is a GPU of its own. Raises ``ShortageError`` with the reason when fewer GPUs fit than are asked
    for and there is no fallback, and for an environment that cannot be understood; any other ``DeviceError``
    for a driver or board that does not answer, and for a ``selection`` that names what is not there.
    """
    if request is None:
        return Lease(devices=(CPU,))
    found = present(without_lost=True)
    may = allowed(found, selection, environment, instances=request.mig is not None)
    fitting = [uuid for uuid in may.uuids if fits(request, found.device(uuid), found)]
    if len(fitting) >= request.n:
        choices = tuple(_alike([_one(uuid, found) for uuid in preferred(fitting, found, warm)], request.n))
        possible = Lease((), choices=choices, order=tuple(fitting))
        return replace(possible.chosen(range(request.n)), choices=choices, order=possible.order)
    hidden = _hidden(found, selection, environment)
    on_purpose = hidden is not None and not _seen(environment, found).reason
    missed = request.mig is not None or len(fitting) + len(found.lost) >= request.n
    if found.lost and missed and not on_purpose:
        # The test might have had it: to skip or to run on the CPU would hide that it is broken.
        told = [explain(request, fitting, may.uuids, may.reason, found)] if found.boards else []
        raise DeviceError("; ".join((*told, *found.lost.values())))
    if request.fallback == CPU:
        return Lease(devices=(CPU,) * request.n, fallback=CPU)
    if hidden is not None:
        raise ShortageError(f"{request}: {hidden}")
    reason = _why_cut(found, selection, environment, may.reason)
    raise ShortageError(explain(request, fitting, may.uuids, reason, found))


def every_visible(
    selection: str | None = None, environment: Mapping[str, str] = os.environ
) -> GpuRequest | None:
    """A request for all GPUs that a process may use; ``None`` where it may use none.

    Raises ``ShortageError`` and ``DeviceError`` as ``allot`` does.
    """
    may = allowed(present(without_lost=True), selection, environment)
    return GpuRequest(len(may.uuids)) if may.uuids else None


def allowed(
    found: Present, selection: str | None, environment: Mapping[str, str], *, instances: bool = False
) -> Visible:
    """The devices that may be leased, and why these are fewer than the host has.

    Of boards that MIG divides only the instances can be. They are what is leased where ``instances`` are
    asked for, where they are named, and where there is nothing else. Raises ``DeviceError`` for a list that
    cannot be understood.
    """
    _refuse_numbers(found, selection, environment)
    hidden = _hidden(found, selection, environment)
    if hidden is not None:
        return Visible((), hidden)
    said = slurm(environment)
    if selection is not None:
        return _leasable(choose(selection, found), found, instances, True, said)
    seen = _seen(environment, found)
    cut = f"{VARIABLE}={environment[VARIABLE]!r}: {seen.reason}" if seen.reason else None
    return _leasable(seen.uuids, found, instances, VARIABLE not in environment, cut, said)


def _one(uuid: str, found: Present) -> Lease:
    part = found.instance(uuid)
    divided = (part.board,) if part is not None else ()
    return Lease((uuid,), (found.device(uuid),), (found.index(uuid),), divided=divided)


def _alike(each: Sequence[Lease], n: int) -> Sequence[Lease]:
    """Those of one model, where there are enough of one.

    Another board of the same model does as well when the first is taken; joules of different ones do not
    compare, and the slowest of several holds up the others.
    """
    for model in dict.fromkeys(one.names for one in each):
        alike = [one for one in each if one.names == model]
        if len(alike) >= n:
            return alike
    return each


def _hidden(found: Present, selection: str | None, environment: Mapping[str, str]) -> str | None:
    """Why the environment allows none of the boards that there are; ``None`` where it allows some."""
    if selection is not None or not found.boards:
        return None
    seen = _seen(environment, found)
    return None if seen.uuids else why_hidden(environment, len(found.boards), seen.reason)


def _seen(environment: Mapping[str, str], found: Present) -> Visible:
    try:
        return visible(environment, found)
    except DeviceError as error:
        # Whoever allots GPUs has given none that can be known, and that is theirs to mend.
        raise ShortageError(str(error)) from None


def _refuse_numbers(found: Present, selection: str | None, environment: Mapping[str, str]) -> None:
    """NVML counts a board that is lost, and whether CUDA does is not known: only names are sure."""
    value = environment.get(VARIABLE, "") if selection is None else selection
    if not found.lost or not any(part.strip()[:1].isdecimal() for part in value.split(",")):
        return
    said = f"{VARIABLE}={value!r}" if selection is None else f"--energy-gpus={value}"
    raise DeviceError(
        f"{said}: numbers may shift while a board is lost ({'; '.join(found.lost.values())}); name GPUs by "
        "UUID with --energy-gpus"
    )


def _why_cut(
    found: Present, selection: str | None, environment: Mapping[str, str], reason: str | None
) -> str | None:
    """With who made the list that leaves boards out, and how to overrule it."""
    if selection is not None:
        chosen = None if selection == "all" else f"--energy-gpus={selection} chooses these"
        return "; ".join(filter(None, (chosen, reason))) or None
    seen = _seen(environment, found)
    if VARIABLE not in environment or set(seen.uuids) >= set(found.uuids):
        return reason
    said = None if seen.reason else f"{VARIABLE}={environment[VARIABLE]!r}"
    advice = None if reason and "--energy-gpus=" in reason else "--energy-gpus=all overrides it on purpose"
    return "; ".join(filter(None, (said, reason, advice)))


def _leasable(
    uuids: Sequence[str], found: Present, instances: bool, all_instances: bool, *reasons: str | None
) -> Visible:
    """These devices without the boards that MIG divides, or the instances of those.

    CUDA shows instances and never the whole of such a board. Instances that nobody asked for are not mixed
    with boards: tests would get either, and their energies do not compare. A list of boards allows no more
    instances than CUDA would show of them, ``all_instances`` is for when nobody made such a list.
    """
    divided = [uuid for uuid in uuids if found.parts(uuid)]
    empty = [uuid for uuid in uuids if uuid in found.mig_enabled and uuid not in divided]
    whole = [uuid for uuid in uuids if uuid not in divided and uuid not in empty]
    parts = [part for uuid in divided for part in found.parts(uuid)]
    shown = parts if instances and all_instances else one_process(parts, found.driver)
    named = [uuid for uuid in whole if found.instance(uuid) is not None]
    if instances:
        kept = (*named, *(part.uuid for part in shown))
    else:
        kept = tuple(whole) or tuple(part.uuid for part in shown)
    names = ",".join(part.uuid for part in parts)
    told = (
        f"{len(divided)} divided by MIG; name instances with --energy-gpus={names}, or ask for them with "
        "gpus(mig=...)"
        if divided and not instances
        else None
    )
    unusable = f"{len(empty)} {EMPTY}" if empty else None
    return Visible(kept, "; ".join(filter(None, (*reasons, told, unusable))) or None)
