# SPDX-License-Identifier: Apache-2.0
"""``--energy-gpus``: GPUs that are chosen on purpose, whatever the environment says."""

from __future__ import annotations

from pytest_llenergy.devices.grammar import matching, whole_number
from pytest_llenergy.devices.inventory import Present
from pytest_llenergy.devices.mig import EMPTY
from pytest_llenergy.devices.visibility import instance_names
from pytest_llenergy.errors import DeviceError


def choose(selection: str, present: Present) -> tuple[str, ...]:
    """The UUIDs of ``all`` boards, or those of a list of numbers in PCI order and of (beginnings of) UUIDs.

    Several MIG instances may be named: each rank gets one. Raises ``DeviceError`` naming the element that
    fits no board or instance, or more than one, or a board that is divided, or that comes a second time.
    """
    if selection == "all":
        return present.uuids
    chosen: list[str] = []
    for element in (part.strip() for part in selection.split(",")):
        uuid = _device(element, present)
        if uuid in chosen:
            raise DeviceError(f"--energy-gpus: {element!r} is {uuid}, which is named before; name each once")
        chosen.append(uuid)
    return tuple(chosen)


def _device(element: str, present: Present) -> str:
    if element.isdecimal():
        matches = list(present.uuids[whole_number(element) :][:1])
    else:
        names = [(uuid, uuid) for uuid in present.uuids] + instance_names(present)
        matches = matching(element, names) if element else []
    if len(matches) != 1:
        labels = [*present.uuids, *(instance.label for instance in present.instances)]
        told = ", ".join(labels) or f"none ({present.missing or 'NVML shows none'})"
        raise DeviceError(f"--energy-gpus: {element!r} names no single GPU; present: {told}")
    parts = present.parts(matches[0])
    if parts:
        labels = [instance.label for instance in parts]
        raise DeviceError(
            f"--energy-gpus: {element!r} is divided by MIG and cannot be used whole; name of it: "
            f"{', '.join(labels)}"
        )
    if matches[0] in present.mig_enabled:
        raise DeviceError(f"--energy-gpus: {element!r} ({matches[0]}) is {EMPTY}")
    return matches[0]
