# SPDX-License-Identifier: Apache-2.0
"""Choose devices for a test, or explain why there are too few."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_llenergy.devices.inventory import NO_INSTANCES, Inventory, find_gpus, read_inventory
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.occupancy import read_memory_use
from pytest_llenergy.devices.request import GpuRequest, format_memory
from pytest_llenergy.devices.visibility import (
    OVERRIDE,
    VISIBLE_DEVICES,
    VisibleDevices,
    describe_settings,
    describe_slurm,
    explain_hidden,
    list_settings,
    parse_selection,
    parse_visible_devices,
)
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.record import Flag

#: Boards without any process differ in used memory by this much at most. A process on a board takes more.
EQUAL_BYTES = 16 * 2**20


#: Name, memory (GiB) and power limit (W).
Kind = tuple[str, float | None, float | None]


class ShortageError(DeviceError):
    """Fewer GPUs fit than the test requests, or the environment hides them all.

    This is a reason to skip the test, not a fault. Any other ``DeviceError`` is a fault.
    """


def select_devices(
    request: GpuRequest | None,
    selection: str | None = None,
    environment: Mapping[str, str] = os.environ,
    warm: Collection[str] = (),
    before: Sequence[Board] = (),
) -> Lease:
    """Select the devices that a test prefers, and list all suitable ones in ``choices``, preferred first.

    A MIG instance counts as a GPU.

    Args:
        request: What the test requests; None for the CPU, as one rank.
        selection: Value of ``--energy-gpus``; without it the environment decides.
        environment: The environment.
        warm: UUIDs of devices on which ranks of this run wait for work.
        before: The boards with which the result will be compared. If this host has enough boards of their
            kind, the test gets no others.

    Raises:
        ShortageError: Fewer GPUs fit than requested and the mark has no fallback, or the environment cannot
            be parsed.
        DeviceError: The driver or a board does not answer, or ``selection`` names a missing device.
    """
    if request is None:
        return Lease(devices=(CPU,))
    if request.per_host is not None and request.per_host < request.n:
        if request.fallback == CPU:
            return Lease(devices=(CPU,) * request.n, fallback=CPU)
        hosts = request.n // request.per_host
        ways = "run with --energy-cluster, and work in ranks (fixture workers or backend)"
        raise ShortageError(f"{request} needs {hosts} hosts: {ways}")
    inventory = read_inventory()
    leasable = list_leasable(inventory, selection, environment, instances=request.mig is not None)
    fitting = [uuid for uuid in leasable.uuids if _find_mismatch(request, uuid, inventory) is None]
    if len(fitting) >= request.n:
        preferred = _sort_by_preference(fitting, warm) if len(fitting) > request.n else fitting
        groups = _group_by_kind(
            [_lease_one(uuid, inventory) for uuid in preferred], request.n, before, inventory
        )
        choices = tuple(choice for group in groups for choice in group)
        kinds = tuple(kind for kind, group in enumerate(groups) for _ in group) if len(groups) > 1 else ()
        plan = Lease((), choices=choices, kinds=kinds, order=tuple(fitting))
        return replace(plan.select(range(request.n)), choices=choices, kinds=kinds, order=plan.order)
    hidden = _explain_all_hidden(inventory, selection, environment)
    on_purpose = hidden is not None and not _read_visible(environment, inventory).reason
    is_missed = request.mig is not None or len(fitting) + len(inventory.lost) >= request.n
    if inventory.lost and is_missed and not on_purpose:
        # The test might use the lost board: skipping it or running on the CPU would hide the fault.
        shortage = _explain_shortage(request, fitting, leasable.uuids, leasable.reason, inventory)
        raise DeviceError("; ".join(([shortage] if inventory.boards else []) + [*inventory.lost.values()]))
    if request.fallback == CPU:
        return Lease(devices=(CPU,) * request.n, fallback=CPU)
    if hidden is not None:
        raise ShortageError(f"{request}: {hidden}")
    reason = _explain_restriction(inventory, selection, environment, leasable.reason)
    raise ShortageError(_explain_shortage(request, fitting, leasable.uuids, reason, inventory))


def request_visible(
    selection: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[GpuRequest | None, list[Flag]]:
    """Return a request for all GPUs that this process may use, or None if it may use none.

    A flag says if the host has GPUs that are therefore not measured.

    Raises:
        ShortageError: As for ``select_devices``.
        DeviceError: ``selection`` names a missing device.
    """
    inventory = find_gpus()
    leasable = list_leasable(inventory, selection, environment)
    if leasable.uuids:
        return GpuRequest(len(leasable.uuids)), []
    if inventory.boards:
        settings = describe_settings(environment, inventory)
        why = f"{settings} hides all {len(inventory.boards)}" if settings else leasable.reason
        on_purpose = not _read_visible(environment, inventory).reason
    else:
        why, on_purpose = "; ".join(inventory.faults), False
    detail = f"GPUs are not measured: {why}"
    flag = Flag(name="meter", severity="note" if on_purpose else "warning", detail=detail)
    return None, [flag] if why else []


def list_leasable(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str], *, instances: bool = False
) -> VisibleDevices:
    """Return the devices that tests may lease, and why others of the host are excluded.

    A board that MIG divides cannot be leased. Its instances can be leased if the request is for
    ``instances``, if the user names them, or if the host has nothing else.

    Raises:
        DeviceError: A list of devices is invalid.
    """
    _refuse_shifted_numbers(inventory, selection, environment)
    hidden = _explain_all_hidden(inventory, selection, environment)
    if hidden is not None:
        return VisibleDevices((), hidden)
    slurm = describe_slurm(environment)
    if selection is not None:
        try:
            selected = parse_selection(selection, inventory)
        except DeviceError as error:
            raise DeviceError(f"--energy-gpus: {error}") from None
        return _replace_divided(selected, inventory, instances, True, slurm)
    visible = _read_visible(environment, inventory)
    cut = f"{describe_settings(environment, inventory)}: {visible.reason}" if visible.reason else None
    all_instances = VISIBLE_DEVICES not in environment
    return _replace_divided(visible.uuids, inventory, instances, all_instances, cut, slurm)


def count_leasable(selection: str | None) -> int:
    """Return how many GPUs and MIG instances tests may lease.

    Args:
        selection: Value of ``--energy-gpus``; without it the environment decides.

    Raises:
        DeviceError: The driver does not answer, or the environment or selection is invalid.
    """
    return len(list_leasable(read_inventory(), selection, os.environ).uuids)


def _sort_by_preference(uuids: Sequence[str], warm: Collection[str] = ()) -> tuple[str, ...]:
    """Sort devices: those with idle ranks of this run first, then by memory in use.

    Devices within ``EQUAL_BYTES`` of the smallest use count as equal and keep the order of the environment. A
    device with unknown use comes last.
    """
    used_bytes = read_memory_use(uuids)
    equal_bytes = min(used_bytes.values(), default=0) + EQUAL_BYTES

    def rank(uuid: str) -> tuple[bool, float]:
        used = used_bytes.get(uuid)
        return uuid not in warm, float("inf") if used is None else max(used, equal_bytes)

    return tuple(sorted(uuids, key=rank))


def _group_by_kind(
    leases: Sequence[Lease], n: int, before: Sequence[Board], inventory: Inventory
) -> list[list[Lease]]:
    """Group devices of which a test may take ``n``: each kind that has enough, or else all in one group.

    A test on several kinds would be as slow as the slowest, and its energy could not be compared with that
    of a test on other boards.
    """
    kinds: dict[Kind, list[Lease]] = {}
    for lease in leases:
        kinds.setdefault(_kind(lease.boards[0], inventory), []).append(lease)
    enough = {kind: group for kind, group in kinds.items() if len(group) >= n}
    wanted = {_kind(board, inventory) for board in before}
    if len(wanted) == 1 and wanted <= enough.keys():
        return [enough[kind] for kind in wanted]
    if not enough:
        return [list(leases)]
    if n == 1:
        return [[lease for lease in leases if _kind(lease.boards[0], inventory) in enough]]
    return list(enough.values())


def _kind(device: Board, inventory: Inventory) -> Kind:
    """Return what comparable devices have in common, see ``compare.comparability``."""
    limit_w = device.power_limit_w
    if limit_w is None:
        # Of the board of a MIG instance.
        same = (board.power_limit_w for board in inventory.boards if board.pci_bus_id == device.pci_bus_id)
        limit_w = next(same, None)
    memory_gib = None if device.memory_bytes is None else round(device.memory_bytes / 2**30, 1)
    return device.name, memory_gib, limit_w


def _lease_one(uuid: str, inventory: Inventory) -> Lease:
    instance = inventory.instance(uuid)
    divided = (instance.board,) if instance is not None else ()
    return Lease((uuid,), (inventory.device(uuid),), (inventory.index(uuid),), divided=divided)


def _find_mismatch(request: GpuRequest, uuid: str, inventory: Inventory) -> str | None:
    """Return the property of a device that does not meet the request; None if all do."""
    device, instance = inventory.device(uuid), inventory.instance(uuid)
    if request.name is not None and request.name.lower() not in device.name.lower():
        return device.name
    profile = None if instance is None else instance.profile
    if request.mig is not None and profile != request.mig.lower():
        return profile or "unknown profile"
    if request.memory is not None and (device.memory_bytes or 0) < request.memory_bytes:
        return format_memory(device.memory_bytes, request.memory_unit)
    return None


def _replace_divided(
    uuids: Sequence[str], inventory: Inventory, instances: bool, all_instances: bool, *reasons: str | None
) -> VisibleDevices:
    """Replace boards that MIG divides by their instances, or leave them out.

    CUDA shows the instances, never the whole of such a board. Instances are not mixed with boards unless they
    were requested: tests would get either, and their energy could not be compared. A list of boards allows no
    more of their instances than CUDA would show; ``all_instances`` allows all if the user made no such list.
    """
    divided = [uuid for uuid in uuids if inventory.board_instances(uuid)]
    empty = [uuid for uuid in uuids if uuid in inventory.mig_enabled and uuid not in divided]
    whole = [uuid for uuid in uuids if uuid not in divided and uuid not in empty]
    parts = [part for uuid in divided for part in inventory.board_instances(uuid)]
    shown = parts if instances and all_instances else inventory.shown_to_one_process(parts)
    named = [uuid for uuid in whole if inventory.instance(uuid) is not None]
    if instances:
        kept = (*named, *(part.uuid for part in shown))
    else:
        kept = tuple(whole) or tuple(part.uuid for part in shown)
    names = ",".join(part.uuid for part in parts)
    advice = (
        f"{len(divided)} divided by MIG; name instances with --energy-gpus={names}, or request them with "
        "gpus(mig=...)"
        if divided and not instances
        else None
    )
    unusable = f"{len(empty)} {NO_INSTANCES}" if empty else None
    return VisibleDevices(kept, "; ".join(filter(None, (*reasons, advice, unusable))) or None)


def _read_visible(environment: Mapping[str, str], inventory: Inventory) -> VisibleDevices:
    try:
        return parse_visible_devices(environment, inventory)
    except DeviceError as error:
        # The environment assigns no identifiable GPU, which is not a fault of the host.
        raise ShortageError(str(error)) from None


def _refuse_shifted_numbers(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str]
) -> None:
    """Refuse numbers while a board is lost: NVML still counts it, and CUDA may not. UUIDs stay valid."""
    settings = list_settings(environment, inventory) if selection is None else {"--energy-gpus": selection}
    name, value = next(iter(settings.items()), ("", ""))
    if not inventory.lost or not any(part.strip()[:1].isdecimal() for part in value.split(",")):
        return
    source = f"{name}={value!r}" if selection is None else f"{name}={value}"
    raise DeviceError(
        f"{source}: numbers may shift while a board is lost ({'; '.join(inventory.lost.values())}); name "
        "GPUs by UUID with --energy-gpus"
    )


def _explain_all_hidden(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str]
) -> str | None:
    """Explain why the environment allows no board; None if it allows a board or the host has none."""
    if selection is not None or not inventory.boards:
        return None
    visible = _read_visible(environment, inventory)
    return None if visible.uuids else explain_hidden(environment, inventory, visible.reason)


def _explain_restriction(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str], reason: str | None
) -> str | None:
    """Extend a reason with the list that excludes boards and the way to override it."""
    if selection is not None:
        chosen = None if selection == "all" else f"--energy-gpus={selection} chooses these"
        return "; ".join(filter(None, (chosen, reason))) or None
    visible, settings = _read_visible(environment, inventory), describe_settings(environment, inventory)
    if not settings or set(visible.uuids) >= set(inventory.uuids):
        return reason
    source = None if visible.reason else settings
    advice = None if reason and "--energy-gpus=" in reason else OVERRIDE
    return "; ".join(filter(None, (source, reason, advice)))


def _explain_shortage(
    request: GpuRequest,
    fitting: Sequence[str],
    leasable: Sequence[str],
    reason: str | None,
    inventory: Inventory,
) -> str:
    """Explain in one line what was requested, how many devices fit, and why the others do not.

    Args:
        request: What the test requests.
        fitting: The leasable devices that fit.
        leasable: The devices that tests may lease.
        reason: Why tests may not lease other devices of the host.
        inventory: What the driver shows.
    """
    if not inventory.boards:
        missing = inventory.driver_missing or "NVML shows none"
        return f"{request}: this host has no GPU ({missing})"
    cause = f" ({reason})" if reason else ""
    if request.mig is not None and not leasable:
        return (
            f"{request}: there is no MIG instance here{cause}; nvidia-smi mig -cgi {request.mig} -C makes "
            "one on a board in MIG mode"
        )
    kind = "MIG instances" if request.mig is not None else "GPUs"
    boards = len(inventory.boards) + len(inventory.lost)
    total = len(inventory.instances) if request.mig is not None else boards
    if len(fitting) == len(leasable):
        return f"{request}: only {len(fitting)} of {total} {kind} may be used here{cause}"
    mismatches = (_find_mismatch(request, uuid, inventory) for uuid in leasable)
    others = [each for each in mismatches if each is not None]
    counts = ", ".join(f"{n} × {text}" if n > 1 else text for text, n in Counter(others).items())
    details = "; ".join(filter(None, (counts, reason)))
    return f"{request}: only {len(fitting)} of {len(leasable)} {kind} fit (others: {details})"
