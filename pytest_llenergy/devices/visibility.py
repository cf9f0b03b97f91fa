# SPDX-License-Identifier: Apache-2.0
"""``CUDA_VISIBLE_DEVICES`` by CUDA's own rules: which of the host's GPUs this process may use.

Identity is the full UUID. Numbers count what NVML shows, which inside a container or a Slurm step with
device cgroups is only what was given to it. ``NVIDIA_VISIBLE_DEVICES`` speaks to the container runtime and
``SLURM_JOB_GPUS`` to people; both may count the boards of the whole host, and neither is read as a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_llenergy.devices import mig
from pytest_llenergy.devices.grammar import BOARD_PREFIX, Visible, by_name, read_list
from pytest_llenergy.devices.inventory import Present
from pytest_llenergy.errors import DeviceError

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
SLURM_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


def visible(environment: Mapping[str, str], present: Present) -> Visible:
    """The boards, or MIG instances, that CUDA would enumerate.

    Raises ``DeviceError`` where numbers name some of several models and CUDA's order cannot be known.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return Visible(present.uuids)
    if value.startswith(mig.PREFIX):
        return _instances(value, present)
    found = read_list(value, present.uuids)
    if not value.startswith(BOARD_PREFIX):
        _check_order(value, environment, found, present)
    return found


def instance_names(present: Present) -> list[tuple[str, str]]:
    """Each instance under its UUID and its legacy name, which in old drivers are one."""
    named = {name: each.uuid for each in present.instances for name in (each.legacy_name, each.uuid)}
    return list(named.items())


def why_hidden(environment: Mapping[str, str], present: int, reason: str | None = None) -> str:
    """The reason that a user reads when the environment hides GPUs that the driver shows."""
    told = f" ({reason})" if reason else ""
    said = slurm(environment)
    shown = f"{present} ({said})" if said else str(present)
    return (
        f"the environment sets {VARIABLE}={environment.get(VARIABLE)!r}, which allows no GPU{told}; the "
        f"driver shows {shown}; --energy-gpus=all overrides it on purpose"
    )


def slurm(environment: Mapping[str, str]) -> str | None:
    """What Slurm says that it gave, for messages only: its numbers may be those of the whole host."""
    said = [f"{name}={environment[name]}" for name in SLURM_VARIABLES if name in environment]
    return f"Slurm says {said[0]}" if said else None


def _instances(value: str, present: Present) -> Visible:
    named = by_name(value, mig.PREFIX, instance_names(present))
    known = {instance.uuid: instance for instance in present.instances}
    instances = [known[uuid] for uuid in named.uuids]
    seen = mig.one_process(instances, present.driver)
    if len(seen) == len(instances):
        return named
    kept = ", ".join(instance.uuid for instance in seen)
    reason = (
        f"CUDA with driver {present.driver} shows one process {kept} of the {len(instances)} MIG instances; "
        f"--energy-gpus={','.join(named.uuids)} gives each rank one"
    )
    return replace(named, uuids=tuple(instance.uuid for instance in seen), reason=reason)


def _check_order(value: str, environment: Mapping[str, str], found: Visible, present: Present) -> None:
    models = {board.name for board in present.boards}
    some = 0 < len(found.uuids) < len(present.boards)
    if len(models) < 2 or not some or environment.get(ORDER) == "PCI_BUS_ID":
        return
    boards = [f"{board.name} {board.uuid}" for board in present.boards]
    told = ", ".join(filter(None, (*boards, slurm(environment))))
    raise DeviceError(
        f"{VARIABLE}={value!r} counts the fastest GPU first, which NVML cannot tell of different models: "
        f"{told}; set {ORDER}=PCI_BUS_ID, or list UUIDs"
    )
