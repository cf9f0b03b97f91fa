# SPDX-License-Identifier: Apache-2.0
"""Choose devices for a test, or explain why there are too few."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_llenergy.devices.inventory import Inventory, find_gpus, read_inventory
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.occupancy import IDLE_BYTES, read_memory_use
from pytest_llenergy.devices.request import GpuRequest, format_memory, parse_memory
from pytest_llenergy.devices.visibility import (
    OVERRIDE,
    VisibleDevices,
    describe_settings,
    parse_selection,
    parse_visible_devices,
)
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.record import Flag


class ShortageError(DeviceError):
    """Fewer GPUs fit than requested: a reason to skip the test. Any other ``DeviceError`` is a fault."""


def select_devices(
    request: GpuRequest | None,
    selection: str | None = None,
    environment: Mapping[str, str] = os.environ,
    warm: Collection[str] = (),
) -> Lease:
    """Select the devices that a test prefers, and list all suitable ones in ``choices``, preferred first.

    A MIG instance counts as a GPU.

    Args:
        request: What the test requests; None for the CPU, as one rank.
        selection: Value of ``--energy-gpus``; without it the environment decides.
        warm: UUIDs of devices on which ranks of this run wait for work.

    Raises:
        ShortageError: Fewer GPUs fit than requested and the mark has no fallback, or the environment cannot
            be parsed.
        DeviceError: The driver or a board does not answer, or ``selection`` names a missing device.
    """
    if request is None:
        return Lease(devices=(CPU,))
    on_cpu = Lease(devices=(CPU,) * request.n, fallback=CPU) if request.fallback == CPU else None
    if request.per_host is not None and request.per_host < request.n:
        if on_cpu is not None:
            return on_cpu
        hosts = request.n // request.per_host
        ways = "run with --energy-cluster, and work in ranks (fixture workers or backend)"
        raise ShortageError(f"{request} needs {hosts} hosts: {ways}")
    inventory = read_inventory()
    leasable = list_leasable(inventory, selection, environment)
    fitting = [uuid for uuid in leasable.uuids if _find_mismatch(request, uuid, inventory) is None]
    if len(fitting) >= request.n:
        preferred = _sort_by_preference(fitting, warm) if len(fitting) > request.n else fitting
        choices = _keep_one_model([_lease_one(uuid, inventory) for uuid in preferred], request.n)
        plan = Lease((), choices=tuple(choices), order=tuple(fitting))
        return replace(plan.select(range(request.n)), choices=plan.choices, order=plan.order)
    if inventory.lost and len(fitting) + len(inventory.lost) >= request.n and not leasable.on_purpose:
        # The test might use the lost board: skipping it or running on the CPU would hide the fault.
        raise DeviceError(f"{request}: {len(fitting)} GPUs fit; {'; '.join(inventory.lost.values())}")
    if on_cpu is not None:
        return on_cpu
    raise ShortageError(f"{request}: {_explain_shortage(request, len(fitting), leasable, inventory)}")


def request_visible(
    selection: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[GpuRequest | None, list[Flag]]:
    """Return a request for all GPUs that this process may use, or None if it may use none.

    A flag says if the host has GPUs that are therefore not measured.
    """
    inventory = find_gpus()
    leasable = list_leasable(inventory, selection, environment)
    if leasable.uuids:
        return GpuRequest(len(leasable.uuids)), []
    why = "; ".join(inventory.faults)
    if inventory.boards:
        settings = describe_settings(environment, inventory)
        why = f"{settings} hides all {len(inventory.boards)}" if settings else leasable.reason or ""
    detail = f"GPUs are not measured: {why}"
    flag = Flag(name="meter", severity="note" if leasable.on_purpose else "warning", detail=detail)
    return None, [flag] if why else []


def list_leasable(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str]
) -> VisibleDevices:
    """Return the devices that tests may lease, and why others of the host are excluded.

    A board that MIG divides cannot be leased. Its instances can be leased if the user names them, or if the
    host has nothing else.

    Raises:
        DeviceError: A list of devices is invalid.
    """
    listed, source = _read_list(inventory, selection, environment)
    if {*listed.uuids} >= {*inventory.uuids}:
        source = ""
    advice = OVERRIDE if selection is None and source else ""
    divided = [uuid for uuid in listed.uuids if inventory.board_instances(uuid)]
    parts = [part.uuid for uuid in divided for part in inventory.board_instances(uuid)]
    kept = [uuid for uuid in listed.uuids if uuid not in divided] or parts
    named = f"{len(divided)} divided by MIG; name instances with --energy-gpus={','.join(parts)}"
    notes = [named] if divided else []
    limits = "; ".join(filter(None, (source, *notes, advice))) or None
    reason = "; ".join(filter(None, (source if listed.reason else "", *notes))) or None
    on_purpose = bool(advice) and not listed.uuids and listed.reason is None
    return VisibleDevices(tuple(kept), reason if kept else limits, limits, on_purpose)


def _read_list(
    inventory: Inventory, selection: str | None, environment: Mapping[str, str]
) -> tuple[VisibleDevices, str]:
    """Return the devices that the option or the environment lists, and what does so."""
    if selection is not None:
        try:
            listed = VisibleDevices(parse_selection(selection, inventory))
        except DeviceError as error:
            raise DeviceError(f"--energy-gpus: {error}") from None
        return listed, f"--energy-gpus={selection} chooses these"
    try:
        listed = parse_visible_devices(environment, inventory)
    except DeviceError as error:
        # The environment assigns no identifiable GPU, which is not a fault of the host.
        raise ShortageError(str(error)) from None
    settings = describe_settings(environment, inventory)
    return listed, f"{settings}: {listed.reason}" if listed.reason else settings


def count_leasable(selection: str | None) -> int:
    """Return how many GPUs and MIG instances tests may lease.

    Raises:
        DeviceError: The driver does not answer, or the environment or selection is invalid.
    """
    return len(list_leasable(read_inventory(), selection, os.environ).uuids)


def _sort_by_preference(uuids: Sequence[str], warm: Collection[str]) -> list[str]:
    """Sort devices: those with idle ranks of this run first, then by memory in use; unknown use comes last.

    Idle devices count as equal and keep the order of the environment.
    """
    used = read_memory_use(uuids)
    return sorted(uuids, key=lambda uuid: (uuid not in warm, max(used.get(uuid, sys.maxsize), IDLE_BYTES)))


def _keep_one_model(leases: list[Lease], n: int) -> list[Lease]:
    """Keep the devices of the first model of which there are ``n``, if a test wants several.

    A test on several models would be as slow as the slowest, and its energy could not be compared with that
    of a test on other boards. If no model has enough devices, all are kept.
    """
    models: dict[tuple[str, ...], list[Lease]] = {}
    for lease in leases:
        models.setdefault(lease.names, []).append(lease)
    return next((group for group in models.values() if len(group) >= n > 1), leases)


def _lease_one(uuid: str, inventory: Inventory) -> Lease:
    instance = inventory.instance(uuid)
    divided = (instance.board,) if instance is not None else ()
    return Lease((uuid,), (inventory.device(uuid),), (inventory.index(uuid),), divided=divided)


def _find_mismatch(request: GpuRequest, uuid: str, inventory: Inventory) -> str | None:
    """Return the property of a device that does not meet the request; None if all do."""
    device = inventory.device(uuid)
    if request.name is not None and request.name.lower() not in device.name.lower():
        return device.name
    if request.memory is not None:
        needed, unit = parse_memory(request.memory)
        return None if (device.memory_bytes or 0) >= needed else format_memory(device.memory_bytes, unit)
    return None


def _explain_shortage(
    request: GpuRequest, fitting: int, leasable: VisibleDevices, inventory: Inventory
) -> str:
    """Explain in one line how many devices fit, and why the others do not."""
    if not inventory.boards:
        return f"this host has no GPU ({inventory.driver_missing or 'NVML shows none'})"
    limits = f" ({leasable.limits})" if leasable.limits else ""
    if fitting == len(leasable.uuids):
        return f"only {fitting} of {len(inventory.boards)} GPUs may be used here{limits}"
    counts = Counter(filter(None, (_find_mismatch(request, uuid, inventory) for uuid in leasable.uuids)))
    others = ", ".join(f"{n} × {text}" if n > 1 else text for text, n in counts.items())
    details = "; ".join(filter(None, (others, leasable.limits)))
    return f"only {fitting} of {len(leasable.uuids)} GPUs fit (others: {details})"
