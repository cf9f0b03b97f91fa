# SPDX-License-Identifier: Apache-2.0
"""What an agent reports about its host, and what pytest refuses about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.environment import collect_environment, installed_version
from pytest_llenergy.devices.inventory import find_gpus
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterFacts, list_meters
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.record.environment import Board, Environment, read_boot_id

#: Packages that must be alike on all hosts: ranks exchange their objects.
PACKAGES = ("torch", "transformers")


class HostFacts(msgspec.Struct, frozen=True):
    """A host as its agent sees it.

    Attributes:
        host: Its name.
        boot_id: Linux's identifier of its boot: equal for two agents on one host.
        pid: Process of the agent.
        nice: Niceness of that process, which its ranks inherit.
        versions: Of Python, pytest-llenergy and ``PACKAGES``, as far as they are installed.
    """

    host: str
    boot_id: str
    pid: int
    nice: int
    versions: dict[str, str]


class HostInventory(msgspec.Struct, frozen=True):
    """What ``llenergy doctor`` shows of a host: its GPUs in PCI order, why others are missing, its meters."""

    devices: Sequence[Board]
    devices_missing: Sequence[str]
    meters: Sequence[MeterFacts]


def describe() -> HostFacts:
    """Describe this host and process."""
    versions = {"Python": platform.python_version(), "pytest-llenergy": pytest_llenergy.__version__}
    packages = {name: found for name in PACKAGES if (found := installed_version(name)) is not None}
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return HostFacts(platform.node(), read_boot_id(), os.getpid(), nice, versions | packages)


def refuse_differences(ours: HostFacts, hosts: Mapping[str, HostFacts]) -> None:
    """Refuse hosts whose Python (3.x), pytest-llenergy, torch or transformers differ, and slower processes.

    The build of a package, such as ``+cu128``, must be the same on all hosts but may differ on pytest's own,
    which may have no GPU.

    Args:
        ours: pytest's own host.
        hosts: The others, by name.

    Raises:
        WorkerError: Names both sides.
    """
    own_name = f"pytest's host {ours.host}"
    for name, facts in hosts.items():
        first = next(iter(hosts))
        for other_name, other, build in ((own_name, ours, False), (first, hosts[first], True)):
            for what in (*ours.versions, *facts.versions):
                found, expected = (each.versions.get(what, "(none)") for each in (facts, other))
                if _compared(what, found, build=build) != _compared(what, expected, build=build):
                    remedy = "install the same on all hosts"
                    raise WorkerError(f"{name} has {what} {found}, and {other_name} has {expected}: {remedy}")
        if facts.nice > ours.nice:
            # Other processes would take the time of its ranks.
            raise WorkerError(
                f"{name}: niceness {facts.nice}, pytest's is {ours.nice}: start Ray there with "
                "RAY_worker_niceness=0"
            )


def _compared(what: str, version: str, *, build: bool) -> str:
    if what == "Python":
        return ".".join(version.split(".")[:2])
    return version if build else version.partition("+")[0]


class AboutHost:
    """Answers the calls ``host.*`` of an agent."""

    def close(self) -> None:
        """Do nothing: the agent closes each of its objects."""

    def environment(self) -> Environment:
        """Return machine and packages, for the record."""
        return collect_environment()

    def inventory(self) -> HostInventory:
        """Open the driver and every meter, which takes seconds."""
        boards, missing = _list_devices()
        targets = [Targets(), *(Targets((board.uuid,)) for board in boards)]
        return HostInventory(boards, missing, [each for one in targets for each in list_meters(one)])


def open_host(_link: Any) -> AboutHost:
    """Return what answers the calls ``host.*``."""
    return AboutHost()


def _list_devices() -> tuple[list[Board], list[str]]:
    inventory = find_gpus()
    missing = inventory.faults
    if inventory.driver_missing is not None:
        missing.append(inventory.driver_missing)
    try:
        visible = list_leasable(inventory, None, os.environ)
    except DeviceError as error:
        return [], [*missing, str(error)]
    if visible.reason is not None:
        missing.append(visible.reason)
    # Launchers list them in any order.
    uuids = sorted(visible.uuids, key=inventory.index)
    return [inventory.device(uuid) for uuid in uuids], missing
