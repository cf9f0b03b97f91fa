# SPDX-License-Identifier: Apache-2.0
"""What an agent reports about its host and process, and what pytest refuses about it."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.environment import collect_environment, installed_version
from pytest_llenergy.devices.inventory import find_gpus
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterFacts, list_meters
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.ranks.plan import THREAD_VARIABLES
from pytest_llenergy.record.environment import Board, read_boot_id

#: Packages that must be alike on all hosts: ranks exchange their objects.
PACKAGES = ("torch", "transformers")

PROC = Path("/proc/self")


class ProcessSettings(msgspec.Struct, frozen=True):
    """Settings of a process that its children inherit, and that launchers such as Ray change.

    Attributes:
        nice: Niceness.
        oom_score_adj: Preference of the out-of-memory killer for it; None where the system has none.
        open_files: Soft limit of open files; -1 for none.
        variables: Environment variables that limit threads, if set.
    """

    nice: int
    oom_score_adj: int | None
    open_files: int
    variables: dict[str, str]

    @classmethod
    def read(cls) -> ProcessSettings:
        """Return the settings of this process."""
        adjustment = None
        with suppress(OSError):
            adjustment = int((PROC / "oom_score_adj").read_text())
        return cls(
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            oom_score_adj=adjustment,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        )

    def as_primitives(self) -> dict[str, Any]:
        """Return it for a message."""
        primitives: dict[str, Any] = msgspec.to_builtins(self)
        return primitives

    def adopt(self) -> list[str]:
        """Set this process to these settings of pytest. Returns a line for each that could not be set."""
        # Each thread has its own niceness.
        for thread in (PROC / "task").iterdir() if PROC.exists() else ():
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), self.nice)
        if self.oom_score_adj is not None:
            with suppress(OSError):
                (PROC / "oom_score_adj").write_text(str(self.oom_score_adj))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for limits in ((self.open_files, hard), (self.open_files, self.open_files), (hard, hard)):
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                break
        for name in THREAD_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(self.variables)
        now = ProcessSettings.read()
        rows = (
            ("niceness", now.nice, self.nice),
            ("oom_score_adj", now.oom_score_adj, self.oom_score_adj),
            ("limit of open files", now.open_files, self.open_files),
        )
        return [f"{name} {found}, pytest's is {wanted}" for name, found, wanted in rows if found != wanted]


def allow_open_files(count: int) -> None:
    """Raise the soft limit of this process so that it can open ``count`` more files.

    Raises:
        WorkerError: The hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + (sum(1 for _ in (PROC / "fd").iterdir()) if PROC.exists() else 0)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise WorkerError(
            f"this process needs {needed} open files for its hosts and ranks, and may have {hard}: "
            "raise the hard limit (ulimit -Hn), or use fewer hosts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class HostFacts(msgspec.Struct, frozen=True):
    """A host as its agent sees it.

    Attributes:
        host: Its name.
        boot_id: Linux's identifier of its boot: equal for two agents on one host.
        clock_offsets: Offsets of the clocks of a time namespace, as the kernel prints them; "" for none.
        pid: Process of the agent.
        python: Version of Python.
        plugin: Version of pytest-llenergy.
        packages: Versions of ``PACKAGES``, if installed.
        settings: Settings of its process, as the launcher made it.
        devices: GPUs that tests may use, in PCI order.
        devices_missing: Why others, or all, are not among them.
        meters: What each meter reads; empty unless asked for.
    """

    host: str
    boot_id: str
    clock_offsets: str
    pid: int
    python: str
    plugin: str
    packages: dict[str, str]
    settings: ProcessSettings
    devices: list[Board] = msgspec.field(default_factory=list)
    devices_missing: list[str] = msgspec.field(default_factory=list)
    meters: list[MeterFacts] = msgspec.field(default_factory=list)

    @classmethod
    def from_primitives(cls, primitives: Any) -> HostFacts:
        """Return it from a message."""
        return msgspec.convert(primitives, cls)


def describe(*, devices: bool = True, meters: bool = False) -> HostFacts:
    """Describe this host and process.

    Args:
        devices: Ask the driver for the GPUs, in this process.
        meters: Open every meter, which takes seconds.
    """
    boards, missing = _list_devices() if devices else ([], [])
    targets = [Targets(), *(Targets((board.uuid,)) for board in boards)]
    offsets = ""
    with suppress(OSError):
        offsets = " ".join((PROC / "timens_offsets").read_text().split())
    return HostFacts(
        host=platform.node(),
        boot_id=read_boot_id(),
        clock_offsets=offsets,
        pid=os.getpid(),
        python=platform.python_version(),
        plugin=pytest_llenergy.__version__,
        packages={name: found for name in PACKAGES if (found := installed_version(name)) is not None},
        settings=ProcessSettings.read(),
        devices=boards,
        devices_missing=missing,
        meters=[each for one in targets for each in list_meters(one)] if meters else [],
    )


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


def refuse_differences(ours: HostFacts, hosts: Mapping[str, HostFacts]) -> None:
    """Refuse hosts whose Python (major.minor), pytest-llenergy, torch or transformers differ.

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
            for what, found, expected in _differences(facts, other, build):
                remedy = "install the same on all hosts"
                raise WorkerError(f"{name} has {what} {found}, and {other_name} has {expected}: {remedy}")


def _differences(one: HostFacts, other: HostFacts, build: bool) -> Iterator[tuple[str, str, str]]:
    def versions(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
        yield "Python", facts.python, ".".join(facts.python.split(".")[:2])
        yield "pytest-llenergy", facts.plugin, facts.plugin
        for name in PACKAGES:
            found = facts.packages.get(name, "(none)")
            yield name, found, found if build else found.partition("+")[0]

    for (what, found, compared), (_, expected, wanted) in zip(versions(one), versions(other), strict=True):
        if compared != wanted:
            yield what, found, expected


class HostService:
    """Verbs ``host.describe``, ``host.environment`` and ``host.adopt`` of an agent."""

    def __init__(self, _context: object) -> None:
        pass

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            "describe": lambda meters=False: msgspec.to_builtins(describe(meters=meters)),
            "environment": lambda: msgspec.to_builtins(collect_environment()),
            "adopt": lambda settings: msgspec.convert(settings, ProcessSettings).adopt(),
        }

    def close(self) -> None:
        """See ``Service``."""
