# SPDX-License-Identifier: Apache-2.0
"""GPUs that this process may use: parse ``CUDA_VISIBLE_DEVICES``, its like of AMD, and ``--energy-gpus``.

``CUDA_VISIBLE_DEVICES`` follows the CUDA programming guide: numbers, or UUIDs and beginnings of them; an
element that is negative, out of range, ambiguous, unknown or of the other kind ends the list, and a repeated
one empties it. ROCm reads
``ROCR_VISIBLE_DEVICES``, and then ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES``, each of which counts
what the one before has left.

Devices are identified by full UUIDs. Numbers count what the driver shows, which inside a container or a Slurm
step with device cgroups is only what was assigned to it. ``NVIDIA_VISIBLE_DEVICES`` is for the container
runtime and ``SLURM_JOB_GPUS`` for people. Both may count the boards of the whole host, so neither is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.devices.amd_smi import is_amd
from pytest_llenergy.devices.inventory import Inventory
from pytest_llenergy.errors import DeviceError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
ROCR, HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
#: The end of a reason why the environment allows too few GPUs, on pytest's own host.
OVERRIDE = "--energy-gpus=all overrides it on purpose"


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
    """Return the boards and MIG instances that CUDA or ROCm would enumerate.

    Of several MIG instances CUDA may show a process only the first; each rank gets one.

    Raises:
        DeviceError: Numbers name some of several models, whose order in CUDA is unknown.
    """
    visible = VisibleDevices(inventory.uuids)
    for value in list_settings(environment, inventory).values():
        numbered = visible.uuids
        # A MIG instance is visible by its UUID alone.
        named = [*numbered, *(instance.uuid for instance in inventory.instances)]
        chosen: list[str] = []
        ended = None
        for element in value.split(","):
            if _kind(element) != _kind(value):
                matches = []
            elif element.strip().isdecimal():
                matches = list(numbered[int(element) :][:1])
            else:
                matches = [uuid for uuid in named if element and uuid.startswith(element)]
            if len(matches) != 1:
                # An empty or negative one is the usual way to end a list on purpose.
                usual = element.strip()[:1] in ("", "-")
                ended = None if usual else f"{element!r} does not match exactly one GPU"
                break
            if matches[0] in chosen:
                chosen, ended = [], f"{element!r} repeats a device, so CUDA shows none"
                break
            chosen.append(matches[0])
        visible = VisibleDevices(tuple(chosen), ended)
        if value.strip()[:1].isdecimal():
            _check_order(value, environment, visible, inventory)
    return visible


def _kind(element: str) -> str:
    """Return what a list holds by its first element: numbers, around which blanks do not matter, or names."""
    return "number" if element.lstrip()[:1].isdecimal() else element[:4]


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
        matches = [uuid for uuid in inventory.uuids if inventory.index(uuid) == int(element)]
    else:
        named = [*inventory.uuids, *(instance.uuid for instance in inventory.instances)]
        matches = [uuid for uuid in named if element and uuid.startswith(element)]
    if len(matches) != 1:
        labels = [*inventory.uuids, *(instance.label for instance in inventory.instances)]
        present = ", ".join(labels) or f"none ({inventory.driver_missing or 'NVML shows none'})"
        raise DeviceError(f"{element!r} does not match exactly one GPU; present: {present}")
    if instances := inventory.board_instances(matches[0]):
        raise DeviceError(
            f"{element!r} is divided by MIG and cannot be used whole; name an instance: "
            f"{', '.join(instance.label for instance in instances)}"
        )
    return matches[0]
