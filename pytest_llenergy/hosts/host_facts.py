# SPDX-License-Identifier: Apache-2.0
"""What an agent reports about its host, and what pytest refuses about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.environment import installed_version
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.record.environment import read_boot_id

#: Packages that must be alike on all hosts: ranks exchange their objects.
PACKAGES = ("torch", "transformers")


class HostFacts(msgspec.Struct, frozen=True):
    """A host as its agent sees it. Another version of the plugin may send other fields: its versions tell.

    Attributes:
        host: Its name.
        boot_id: Linux's identifier of its boot: equal for two agents on one host.
        pid: Process of the agent.
        nice: Niceness of that process, which its ranks inherit.
        versions: Of Python, pytest-llenergy and ``PACKAGES``, as far as they are installed.
    """

    host: str = ""
    boot_id: str = ""
    pid: int = 0
    nice: int = 0
    versions: dict[str, str] = {}


def describe() -> HostFacts:
    """Describe this host and process."""
    versions = {"Python": platform.python_version(), "pytest-llenergy": pytest_llenergy.__version__}
    packages = {name: found for name in PACKAGES if (found := installed_version(name)) is not None}
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return HostFacts(platform.node(), read_boot_id(), os.getpid(), nice, versions | packages)


def refuse_differences(ours: HostFacts, hosts: Mapping[str, HostFacts]) -> None:
    """Refuse hosts whose Python (3.x), pytest-llenergy, torch or transformers differ, and slower processes.

    The build of a package, such as ``+cu128``, may be another one: pytest's own host may have no GPU.

    Args:
        ours: pytest's own host.
        hosts: The others, by name.

    Raises:
        WorkerError: Names both sides.
    """
    for name, facts in hosts.items():
        for what in dict.fromkeys((*ours.versions, *facts.versions)):
            found, expected = (each.versions.get(what, "(none)") for each in (facts, ours))
            if _compared(what, found) != _compared(what, expected):
                raise WorkerError(
                    f"{name} has {what} {found}, and pytest's host {ours.host} has {expected}: install the "
                    "same on all hosts"
                )
        if facts.nice > ours.nice:
            # Other processes would take the time of its ranks.
            raise WorkerError(
                f"{name}: niceness {facts.nice}, pytest's is {ours.nice}: start Ray there with "
                "RAY_worker_niceness=0"
            )


def _compared(what: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if what == "Python" else version.partition("+")[0]
