# SPDX-License-Identifier: Apache-2.0
"""Which GPUs this process may use: CUDA_VISIBLE_DEVICES and --energy-gpus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import takewhile

from pytest_llenergy.devices import mig
from pytest_llenergy.devices.inventory import Inventory
from pytest_llenergy.devices.mig import NO_INSTANCES
from pytest_llenergy.errors import DeviceError

# The grammar of ``CUDA_VISIBLE_DEVICES``: a text and the names that it may hold, without a driver.
#
# As the CUDA programming guide and torch's parser have it: an element that is negative, out of range,
# ambiguous or unknown ends the list; the form of the first element (number, ``GPU-``, ``MIG-``) rules; a
# device named twice leaves none.

BOARD_PREFIX = "GPU-"


@dataclass(frozen=True)
class VisibleDevices:
    """Full UUIDs in the order of the list, and why it gives fewer than it names, if it does."""

    uuids: tuple[str, ...]
    reason: str | None = None


def parse_list(value: str, uuids: Sequence[str]) -> VisibleDevices:
    """A list of numbers, or of beginnings of UUIDs, that selects among boards in this order."""
    if value.startswith(BOARD_PREFIX):
        return parse_names(value, BOARD_PREFIX, [(uuid, uuid) for uuid in uuids])
    return parse_numbers(value, uuids)


def parse_names(value: str, prefix: str, names: Sequence[tuple[str, str]]) -> VisibleDevices:
    """A list of elements that begin with the prefix, among devices given as (name, UUID)."""
    elements = value.split(",")
    of_form = [*takewhile(lambda element: element.startswith(prefix), elements)]
    chosen: list[str] = []
    reason = None
    for element in of_form:
        matches = match_uuids(element, names)
        if len(matches) != 1:
            has = "is the beginning of more than one" if matches else "names none that the driver shows"
            reason = f"{element!r} {has}"
            break
        chosen.append(matches[0])
    # A text repeated after the end of the list counts too.
    repeated = _find_repeated(of_form, of_form) or _find_repeated(chosen, of_form)
    if repeated is not None:
        return VisibleDevices((), _repeated_reason(repeated))
    after = elements[len(of_form) : len(of_form) + 1]
    if reason is None and after and after[0].strip():
        reason = f"{after[0]!r} does not begin with {prefix} as the first does"
    return VisibleDevices(tuple(chosen), reason)


def match_uuids(element: str, names: Iterable[tuple[str, str]]) -> list[str]:
    """The UUIDs, given as (name, UUID), whose name this is or begins with it. Legacy MIG names are whole."""
    pairs = list(names)
    whole = [uuid for name, uuid in pairs if name == element]
    return whole or [uuid for name, uuid in pairs if "/" not in name and name.startswith(element)]


def parse_numbers(value: str, uuids: Sequence[str]) -> VisibleDevices:
    elements = value.split(",")
    numbers = [*takewhile(lambda number: number >= 0, map(_parse_number, elements))]
    repeated = _find_repeated(numbers, elements)
    if repeated is not None:
        return VisibleDevices((), _repeated_reason(repeated))
    chosen = tuple(uuids[number] for number in takewhile(lambda number: number < len(uuids), numbers))
    return VisibleDevices(chosen, _explain_end(elements, len(numbers), len(chosen), len(uuids)))


def _explain_end(elements: Sequence[str], numbers: int, chosen: int, present: int) -> str | None:
    if chosen == len(elements):
        return None
    element = elements[chosen]
    if chosen < numbers:
        return f"{element!r} is out of range: the driver shows {present}, counted from 0"
    if not element.strip() or element.strip().startswith("-"):
        # How one says that nothing follows.
        return None
    if numbers:
        return f"{element!r} is no number as the first is"
    return f"{element!r} neither is a number nor begins with GPU- or MIG-"


def _parse_number(element: str) -> int:
    # strtoul semantics: leading blanks and trailing text are ignored.
    number = re.match(r"\s*([+-]?[0-9]+)", element)
    return parse_whole_number(number.group(1)) if number else -1


def parse_whole_number(text: str) -> int:
    """Of any length: ``int`` alone refuses more than some thousand digits."""
    return int(Decimal(text))


def _find_repeated(values: Sequence[object], elements: Sequence[str]) -> str | None:
    for place, value in enumerate(values):
        if value in values[:place]:
            return elements[place]
    return None


def _repeated_reason(element: str) -> str:
    return f"{element!r} names what is named before it, and CUDA then shows none"


# ``CUDA_VISIBLE_DEVICES`` by CUDA's own rules: which of the host's GPUs this process may use.
#
# Identity is the full UUID. Numbers count what NVML shows, which inside a container or a Slurm step with
# device cgroups is only what was given to it. ``NVIDIA_VISIBLE_DEVICES`` speaks to the container runtime and
# ``SLURM_JOB_GPUS`` to people; both may count the boards of the whole host, and neither is read as a list.

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
SLURM_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


def parse_visible_devices(environment: Mapping[str, str], present: Inventory) -> VisibleDevices:
    """The boards, or MIG instances, that CUDA would enumerate.

    Raises ``DeviceError`` where numbers name some of several models and CUDA's order cannot be known.
    """
    value = environment.get(VISIBLE_DEVICES)
    if value is None:
        return VisibleDevices(present.uuids)
    if value.startswith(mig.MIG_PREFIX):
        return _parse_instances(value, present)
    found = parse_list(value, present.uuids)
    if not value.startswith(BOARD_PREFIX):
        _check_order(value, environment, found, present)
    return found


def instance_names(present: Inventory) -> list[tuple[str, str]]:
    """Each instance under its UUID and its legacy name, which in old drivers are one."""
    named = {name: each.uuid for each in present.instances for name in (each.legacy_name, each.uuid)}
    return list(named.items())


def explain_hidden(environment: Mapping[str, str], present: int, reason: str | None = None) -> str:
    """The reason that a user reads when the environment hides GPUs that the driver shows."""
    told = f" ({reason})" if reason else ""
    said = describe_slurm(environment)
    shown = f"{present} ({said})" if said else str(present)
    return (
        f"the environment sets {VISIBLE_DEVICES}={environment.get(VISIBLE_DEVICES)!r}, which allows no "
        f"GPU{told}; the driver shows {shown}; --energy-gpus=all overrides it on purpose"
    )


def describe_slurm(environment: Mapping[str, str]) -> str | None:
    """What Slurm says that it gave, for messages only: its numbers may be those of the whole host."""
    said = [f"{name}={environment[name]}" for name in SLURM_VARIABLES if name in environment]
    return f"Slurm says {said[0]}" if said else None


def _parse_instances(value: str, present: Inventory) -> VisibleDevices:
    named = parse_names(value, mig.MIG_PREFIX, instance_names(present))
    known = {instance.uuid: instance for instance in present.instances}
    instances = [known[uuid] for uuid in named.uuids]
    seen = mig.shown_to_one_process(instances, present.driver)
    if len(seen) == len(instances):
        return named
    kept = ", ".join(instance.uuid for instance in seen)
    reason = (
        f"CUDA with driver {present.driver} shows one process {kept} of the {len(instances)} MIG instances; "
        f"--energy-gpus={','.join(named.uuids)} gives each rank one"
    )
    return replace(named, uuids=tuple(instance.uuid for instance in seen), reason=reason)


def _check_order(
    value: str, environment: Mapping[str, str], found: VisibleDevices, present: Inventory
) -> None:
    models = {board.name for board in present.boards}
    some = 0 < len(found.uuids) < len(present.boards)
    if len(models) < 2 or not some or environment.get(DEVICE_ORDER) == "PCI_BUS_ID":
        return
    boards = [f"{board.name} {board.uuid}" for board in present.boards]
    told = ", ".join(filter(None, (*boards, describe_slurm(environment))))
    raise DeviceError(
        f"{VISIBLE_DEVICES}={value!r} counts the fastest GPU first, which NVML cannot tell of different "
        f"models: {told}; set {DEVICE_ORDER}=PCI_BUS_ID, or list UUIDs"
    )


# ``--energy-gpus``: GPUs that are chosen on purpose, whatever the environment says.


def parse_selection(selection: str, present: Inventory) -> tuple[str, ...]:
    """The UUIDs of ``all`` boards, or those of a list of numbers in PCI order and of (beginnings of) UUIDs.

    Several MIG instances may be named: each rank gets one. Raises ``DeviceError`` naming the element that
    fits no board or instance, or more than one, or a board that is divided, or that comes a second time.
    """
    if selection == "all":
        return present.uuids
    chosen: list[str] = []
    for element in (part.strip() for part in selection.split(",")):
        uuid = _parse_device(element, present)
        if uuid in chosen:
            raise DeviceError(f"--energy-gpus: {element!r} is {uuid}, which is named before; name each once")
        chosen.append(uuid)
    return tuple(chosen)


def _parse_device(element: str, present: Inventory) -> str:
    if element.isdecimal():
        matches = list(present.uuids[parse_whole_number(element) :][:1])
    else:
        names = [(uuid, uuid) for uuid in present.uuids] + instance_names(present)
        matches = match_uuids(element, names) if element else []
    if len(matches) != 1:
        labels = [*present.uuids, *(instance.label for instance in present.instances)]
        told = ", ".join(labels) or f"none ({present.driver_missing or 'NVML shows none'})"
        raise DeviceError(f"--energy-gpus: {element!r} names no single GPU; present: {told}")
    parts = present.instances_of(matches[0])
    if parts:
        labels = [instance.label for instance in parts]
        raise DeviceError(
            f"--energy-gpus: {element!r} is divided by MIG and cannot be used whole; name of it: "
            f"{', '.join(labels)}"
        )
    if matches[0] in present.mig_enabled:
        raise DeviceError(f"--energy-gpus: {element!r} ({matches[0]}) is {NO_INSTANCES}")
    return matches[0]
