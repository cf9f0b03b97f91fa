# SPDX-License-Identifier: Apache-2.0
"""GPUs that this process may use: parse ``CUDA_VISIBLE_DEVICES``, its like of AMD, and ``--energy-gpus``.

``CUDA_VISIBLE_DEVICES`` follows the CUDA programming guide and torch's parser: an element that is negative,
out of range, ambiguous or unknown ends the list; the form of the first element (number, ``GPU-``, ``MIG-``)
holds for all; a device named twice leaves none. ROCm reads ``ROCR_VISIBLE_DEVICES``, and then
``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES``, each of which counts what the one before has left.

Devices are identified by full UUIDs. Numbers count what the driver shows, which inside a container or a Slurm
step with device cgroups is only what was assigned to it. ``NVIDIA_VISIBLE_DEVICES`` is for the container
runtime and ``SLURM_JOB_GPUS`` for people. Both may count the boards of the whole host, so neither is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import takewhile

from pytest_llenergy.devices.amd_smi import is_amd
from pytest_llenergy.devices.inventory import MIG_PREFIX, NO_INSTANCES, Inventory
from pytest_llenergy.errors import DeviceError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
ROCR, HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
#: The end of a reason why the environment allows too few GPUs, on pytest's own host.
OVERRIDE = "--energy-gpus=all overrides it on purpose"
BOARD_PREFIX = "GPU-"


@dataclass(frozen=True)
class VisibleDevices:
    """The devices that a list allows.

    Attributes:
        uuids: Full UUIDs in the order of the list.
        reason: What is wrong with the list, or why it allows no device.
        limits: Everything that excludes devices, for a request that finds too few.
        on_purpose: Whether all are hidden on purpose.
    """

    uuids: tuple[str, ...]
    reason: str | None = None
    limits: str | None = None
    on_purpose: bool = False


def visible_variables(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables that show a process these devices and no others; without devices, none."""
    names = ",".join(uuids)
    if uuids and is_amd(uuids[0]):
        # Those after the first count what it has left.
        numbers = ",".join(map(str, range(len(uuids))))
        return {ROCR: names, HIP: numbers, VISIBLE_DEVICES: numbers}
    return {VISIBLE_DEVICES: names, DEVICE_ORDER: "PCI_BUS_ID", HIP: names, ROCR: names}


def list_settings(environment: Mapping[str, str], inventory: Inventory) -> dict[str, str]:
    """Return the variables that restrict the boards of this host, in the order in which they are read."""
    names = (ROCR, HIP, VISIBLE_DEVICES) if any(map(is_amd, inventory.uuids)) else (VISIBLE_DEVICES,)
    return {name: environment[name] for name in names if name in environment}


def describe_settings(environment: Mapping[str, str], inventory: Inventory) -> str:
    """Return the variables that restrict the boards of this host as they are written; "" if none is set."""
    settings = list_settings(environment, inventory)
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def parse_visible_devices(environment: Mapping[str, str], inventory: Inventory) -> VisibleDevices:
    """Return the boards, or MIG instances, that CUDA or ROCm would enumerate.

    Raises:
        DeviceError: Numbers name some of several models, whose order in CUDA is unknown.
    """
    visible = VisibleDevices(inventory.uuids)
    for value in list_settings(environment, inventory).values():
        if value.startswith(MIG_PREFIX):
            return _parse_instances(value, inventory)
        if value.startswith(BOARD_PREFIX):
            visible = _parse_names(value, BOARD_PREFIX, {uuid: uuid for uuid in visible.uuids})
        else:
            visible = _parse_numbers(value, visible.uuids)
            _check_order(value, environment, visible, inventory)
    return visible


def _parse_names(value: str, prefix: str, uuid_of: Mapping[str, str]) -> VisibleDevices:
    """Parse elements that begin with the prefix, among the UUIDs of devices by name."""
    elements = value.split(",")
    prefixed = [*takewhile(lambda element: element.startswith(prefix), elements)]
    matches = (_match_uuids(element, uuid_of) for element in prefixed)
    chosen = [found[0] for found in takewhile(lambda found: len(found) == 1, matches)]
    # An element that is repeated after the end of the list counts too.
    return _end_list(elements, chosen, prefixed, chosen)


def _match_uuids(element: str, uuid_of: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of devices whose name is the element or begins with it.

    Legacy names of MIG instances must match as a whole.
    """
    if element in uuid_of:
        return [uuid_of[element]]
    return [uuid for name, uuid in uuid_of.items() if "/" not in name and name.startswith(element)]


def _parse_numbers(value: str, uuids: Sequence[str]) -> VisibleDevices:
    elements = value.split(",")
    numbers = [*takewhile(lambda number: number >= 0, map(_parse_number, elements))]
    chosen = [uuids[number] for number in takewhile(lambda number: number < len(uuids), numbers)]
    return _end_list(elements, chosen, numbers)


def _parse_number(element: str) -> int:
    # As strtoul: leading blanks and trailing text are ignored. Of any length, which int() alone refuses.
    number = re.match(r"\s*([+-]?[0-9]+)", element)
    return int(Decimal(number.group(1))) if number else -1


def _end_list(elements: Sequence[str], chosen: Sequence[str], *unique: Sequence[object]) -> VisibleDevices:
    """Return the devices of a list, and which element ended it; none if a device is repeated."""
    for values in unique:
        for place, value in enumerate(values):
            if value in values[:place]:
                return VisibleDevices((), f"{elements[place]!r} repeats a device, so CUDA shows none")
    last = elements[len(chosen)].strip() if len(chosen) < len(elements) else ""
    # An empty or negative one is the usual way to end a list on purpose.
    ended = None if not last or last.startswith("-") else f"{last!r} does not match exactly one GPU"
    return VisibleDevices(tuple(chosen), ended)


def _parse_instances(value: str, inventory: Inventory) -> VisibleDevices:
    named = _parse_names(value, MIG_PREFIX, _instance_names(inventory))
    by_uuid = {instance.uuid: instance for instance in inventory.instances}
    shown = [part.uuid for part in inventory.shown_to_one_process([by_uuid[uuid] for uuid in named.uuids])]
    if len(shown) == len(named.uuids):
        return named
    reason = (
        f"CUDA with driver {inventory.driver} shows one process {', '.join(shown)} of the {len(named.uuids)} "
        f"MIG instances; --energy-gpus={','.join(named.uuids)} gives each rank one"
    )
    return replace(named, uuids=tuple(shown), reason=reason)


def _instance_names(inventory: Inventory) -> dict[str, str]:
    """Return the UUIDs of instances by UUID and by legacy name, which are the same with old drivers."""
    return {name: each.uuid for each in inventory.instances for name in (each.legacy_name, each.uuid)}


def _check_order(
    value: str, environment: Mapping[str, str], visible: VisibleDevices, inventory: Inventory
) -> None:
    models = {board.name for board in inventory.boards}
    is_part = 0 < len(visible.uuids) < len(inventory.boards)
    known = environment.get(DEVICE_ORDER) == "PCI_BUS_ID" or any(map(is_amd, inventory.uuids))
    if len(models) < 2 or not is_part or known:
        return
    present = ", ".join(f"{board.name} {board.uuid}" for board in inventory.boards)
    raise DeviceError(
        f"{VISIBLE_DEVICES}={value!r} counts the fastest GPU first, an order that NVML does not know for "
        f"different models: {present}; set {DEVICE_ORDER}=PCI_BUS_ID, or list UUIDs"
    )


def parse_selection(selection: str, inventory: Inventory) -> tuple[str, ...]:
    """Return the UUIDs that ``--energy-gpus`` selects: ``all`` boards, or a list.

    Elements of the list are positions in PCI order and UUIDs or beginnings of them. Several MIG instances may
    be named: each rank gets one.

    Raises:
        DeviceError: An element does not match exactly one board or instance, or is repeated, or names a board
            that cannot be used as a whole.
    """
    if selection == "all":
        return inventory.uuids
    chosen: list[str] = []
    for element in (part.strip() for part in selection.split(",")):
        uuid = _parse_device(element, inventory)
        if uuid in chosen:
            raise DeviceError(f"{element!r} is {uuid}, which is already in the list")
        chosen.append(uuid)
    return tuple(chosen)


def _parse_device(element: str, inventory: Inventory) -> str:
    if element.isdecimal():
        # Lost boards keep their numbers.
        matches = [uuid for uuid in inventory.uuids if inventory.index(uuid) == Decimal(element)]
    else:
        names = {uuid: uuid for uuid in inventory.uuids} | _instance_names(inventory)
        matches = _match_uuids(element, names) if element else []
    if len(matches) != 1:
        labels = [*inventory.uuids, *(instance.label for instance in inventory.instances)]
        present = ", ".join(labels) or f"none ({inventory.driver_missing or 'NVML shows none'})"
        raise DeviceError(f"{element!r} does not match exactly one GPU; present: {present}")
    if instances := inventory.board_instances(matches[0]):
        raise DeviceError(
            f"{element!r} is divided by MIG and cannot be used whole; name an instance: "
            f"{', '.join(instance.label for instance in instances)}"
        )
    if matches[0] in inventory.mig_enabled:
        raise DeviceError(f"{element!r} ({matches[0]}) is {NO_INSTANCES}")
    return matches[0]
