# SPDX-License-Identifier: Apache-2.0
"""Choose devices for a test, or explain why there are too few."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_llenergy.devices.inventory import Inventory, read_inventory
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.mig import NO_INSTANCES, shown_to_one_process
from pytest_llenergy.devices.request import GpuRequest, format_memory
from pytest_llenergy.devices.visibility import (
    VISIBLE_DEVICES,
    VisibleDevices,
    describe_slurm,
    explain_hidden,
    parse_selection,
    parse_visible_devices,
)
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

# Which of several devices that would do a test should have first.

#: Memory in use below which a board counts as free of others. A driver without any process shows up to
#: 45 MiB (seven MIG instances, NVIDIA MIG user guide); the context of the smallest LLM takes more than this.
IDLE_BYTES = 256 * 2**20

#: Boards without any process differ by so much at most. A process on a board takes more.
EQUAL_BYTES = 16 * 2**20


def sort_by_preference(uuids: Sequence[str], found: Inventory, warm: Collection[str] = ()) -> tuple[str, ...]:
    """The order in which to try: where ranks of ours wait, then by the memory in use.

    Those within ``SPREAD_BYTES`` of the least are equals, and equals keep their order, which is that of the
    environment. A device whose memory is not told comes last.
    """
    told = [used for used in map(found.used_bytes.get, uuids) if used is not None]
    equal_bytes = min(told, default=0) + EQUAL_BYTES

    def rank(uuid: str) -> tuple[bool, float]:
        used = found.used_bytes.get(uuid)
        return uuid not in warm, float("inf") if used is None else max(used, equal_bytes)

    return tuple(sorted(uuids, key=rank))


# Why there are fewer GPUs than a test asks for, in one line.

NO_GPU = "this host has no NVIDIA GPU"


class ShortageError(DeviceError):
    """Fewer GPUs than asked for, or all hidden by the environment: a reason to skip, and no fault.

    What cannot be understood, or does not answer, is another ``DeviceError``.
    """


def explain_shortage(
    request: GpuRequest,
    fitting: Sequence[str],
    allowed: Sequence[str],
    reason: str | None,
    found: Inventory,
) -> str:
    """What was asked, how many fit, why the others do not.

    ``allowed`` may be leased, ``reason`` is why these are not all; ``fitting`` are those of them that fit.
    """
    if not found.boards:
        return f"{request}: {NO_GPU} ({found.driver_missing or 'NVML shows none'})"
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
    others = "; ".join(filter(None, (_describe_unfit(request, fitting, allowed, found), reason)))
    return f"{request}: only {len(fitting)} of {len(allowed)} {what} fit (others: {others})"


def _describe_unfit(
    request: GpuRequest, fitting: Sequence[str], allowed: Sequence[str], found: Inventory
) -> str:
    lacking = [
        _describe_mismatch(request, found.device(uuid), found) for uuid in allowed if uuid not in fitting
    ]
    return ", ".join(f"{n} × {text}" if n > 1 else text for text, n in Counter(lacking).items())


def _describe_mismatch(request: GpuRequest, device: Board, found: Inventory) -> str:
    """What this device is instead of what was asked for."""
    if not has_name(request, device):
        return device.name
    if not has_profile(request, device, found):
        part = found.instance(device.uuid)
        return (part.profile if part is not None else None) or "unknown profile"
    return format_memory(device.memory_bytes, request.memory_unit)


def fits(request: GpuRequest, device: Board, found: Inventory) -> bool:
    """Whether a device is what was asked for. Memory that is not told is not enough."""
    return (
        has_name(request, device)
        and has_profile(request, device, found)
        and (request.memory is None or (device.memory_bytes or 0) >= request.memory_bytes)
    )


def has_name(request: GpuRequest, device: Board) -> bool:
    """Whether the name is a part of the product name."""
    return request.name is None or request.name.lower() in device.name.lower()


def has_profile(request: GpuRequest, device: Board, found: Inventory) -> bool:
    """Whether the device is an instance of the profile, where one is asked for."""
    if request.mig is None:
        return True
    part = found.instance(device.uuid)
    return part is not None and part.profile == request.mig.lower()


# From what a test asks for to the devices it may have, or the reason why it may not.


def select_devices(
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
    found = read_inventory(without_lost=True)
    may = list_leasable(found, selection, environment, instances=request.mig is not None)
    fitting = [uuid for uuid in may.uuids if fits(request, found.device(uuid), found)]
    if len(fitting) >= request.n:
        choices = tuple(
            _prefer_one_model(
                [_lease_one(uuid, found) for uuid in sort_by_preference(fitting, found, warm)], request.n
            )
        )
        possible = Lease((), choices=choices, order=tuple(fitting))
        return replace(possible.select(range(request.n)), choices=choices, order=possible.order)
    hidden = _explain_all_hidden(found, selection, environment)
    on_purpose = hidden is not None and not _read_visible(environment, found).reason
    missed = request.mig is not None or len(fitting) + len(found.lost) >= request.n
    if found.lost and missed and not on_purpose:
        # The test might have had it: to skip or to run on the CPU would hide that it is broken.
        told = [explain_shortage(request, fitting, may.uuids, may.reason, found)] if found.boards else []
        raise DeviceError("; ".join((*told, *found.lost.values())))
    if request.fallback == CPU:
        return Lease(devices=(CPU,) * request.n, fallback=CPU)
    if hidden is not None:
        raise ShortageError(f"{request}: {hidden}")
    reason = _explain_restriction(found, selection, environment, may.reason)
    raise ShortageError(explain_shortage(request, fitting, may.uuids, reason, found))


def request_visible(
    selection: str | None = None, environment: Mapping[str, str] = os.environ
) -> GpuRequest | None:
    """A request for all GPUs that a process may use; ``None`` where it may use none.

    Raises ``ShortageError`` and ``DeviceError`` as ``allot`` does.
    """
    may = list_leasable(read_inventory(without_lost=True), selection, environment)
    return GpuRequest(len(may.uuids)) if may.uuids else None


def list_leasable(
    found: Inventory, selection: str | None, environment: Mapping[str, str], *, instances: bool = False
) -> VisibleDevices:
    """The devices that may be leased, and why these are fewer than the host has.

    Of boards that MIG divides only the instances can be. They are what is leased where ``instances`` are
    asked for, where they are named, and where there is nothing else. Raises ``DeviceError`` for a list that
    cannot be understood.
    """
    _refuse_shifted_numbers(found, selection, environment)
    hidden = _explain_all_hidden(found, selection, environment)
    if hidden is not None:
        return VisibleDevices((), hidden)
    said = describe_slurm(environment)
    if selection is not None:
        return _replace_divided(parse_selection(selection, found), found, instances, True, said)
    seen = _read_visible(environment, found)
    cut = f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]!r}: {seen.reason}" if seen.reason else None
    return _replace_divided(seen.uuids, found, instances, VISIBLE_DEVICES not in environment, cut, said)


def _lease_one(uuid: str, found: Inventory) -> Lease:
    part = found.instance(uuid)
    divided = (part.board,) if part is not None else ()
    return Lease((uuid,), (found.device(uuid),), (found.index(uuid),), divided=divided)


def _prefer_one_model(each: Sequence[Lease], n: int) -> Sequence[Lease]:
    """Those of one model, where there are enough of one.

    Another board of the same model does as well when the first is taken; joules of different ones do not
    compare, and the slowest of several holds up the others.
    """
    for model in dict.fromkeys(one.names for one in each):
        alike = [one for one in each if one.names == model]
        if len(alike) >= n:
            return alike
    return each


def _explain_all_hidden(
    found: Inventory, selection: str | None, environment: Mapping[str, str]
) -> str | None:
    """Why the environment allows none of the boards that there are; ``None`` where it allows some."""
    if selection is not None or not found.boards:
        return None
    seen = _read_visible(environment, found)
    return None if seen.uuids else explain_hidden(environment, len(found.boards), seen.reason)


def _read_visible(environment: Mapping[str, str], found: Inventory) -> VisibleDevices:
    try:
        return parse_visible_devices(environment, found)
    except DeviceError as error:
        # Whoever allots GPUs has given none that can be known, and that is theirs to mend.
        raise ShortageError(str(error)) from None


def _refuse_shifted_numbers(found: Inventory, selection: str | None, environment: Mapping[str, str]) -> None:
    """NVML counts a board that is lost, and whether CUDA does is not known: only names are sure."""
    value = environment.get(VISIBLE_DEVICES, "") if selection is None else selection
    if not found.lost or not any(part.strip()[:1].isdecimal() for part in value.split(",")):
        return
    said = f"{VISIBLE_DEVICES}={value!r}" if selection is None else f"--energy-gpus={value}"
    raise DeviceError(
        f"{said}: numbers may shift while a board is lost ({'; '.join(found.lost.values())}); name GPUs by "
        "UUID with --energy-gpus"
    )


def _explain_restriction(
    found: Inventory, selection: str | None, environment: Mapping[str, str], reason: str | None
) -> str | None:
    """With who made the list that leaves boards out, and how to overrule it."""
    if selection is not None:
        chosen = None if selection == "all" else f"--energy-gpus={selection} chooses these"
        return "; ".join(filter(None, (chosen, reason))) or None
    seen = _read_visible(environment, found)
    if VISIBLE_DEVICES not in environment or set(seen.uuids) >= set(found.uuids):
        return reason
    said = None if seen.reason else f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]!r}"
    advice = None if reason and "--energy-gpus=" in reason else "--energy-gpus=all overrides it on purpose"
    return "; ".join(filter(None, (said, reason, advice)))


def _replace_divided(
    uuids: Sequence[str], found: Inventory, instances: bool, all_instances: bool, *reasons: str | None
) -> VisibleDevices:
    """These devices without the boards that MIG divides, or the instances of those.

    CUDA shows instances and never the whole of such a board. Instances that nobody asked for are not mixed
    with boards: tests would get either, and their energies do not compare. A list of boards allows no more
    instances than CUDA would show of them, ``all_instances`` is for when nobody made such a list.
    """
    divided = [uuid for uuid in uuids if found.instances_of(uuid)]
    empty = [uuid for uuid in uuids if uuid in found.mig_enabled and uuid not in divided]
    whole = [uuid for uuid in uuids if uuid not in divided and uuid not in empty]
    parts = [part for uuid in divided for part in found.instances_of(uuid)]
    shown = parts if instances and all_instances else shown_to_one_process(parts, found.driver)
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
    unusable = f"{len(empty)} {NO_INSTANCES}" if empty else None
    return VisibleDevices(kept, "; ".join(filter(None, (*reasons, told, unusable))) or None)
