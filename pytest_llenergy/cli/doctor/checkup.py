# SPDX-License-Identifier: Apache-2.0
"""Check a host for ``llenergy doctor``: driver, boards, meters, backends and leases. Prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.registry import discover_backends
from pytest_llenergy.cli.doctor.steps import Trial
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.amd import AmdBoard, list_boards
from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.inventory import Inventory, read_answering
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import describe_leases
from pytest_llenergy.devices.mig import NO_INSTANCES, Instance
from pytest_llenergy.devices.noted_changes import describe_left_changes
from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.devices.occupancy import BoardUse, inspect_board
from pytest_llenergy.devices.visibility import VISIBLE_DEVICES, parse_visible_devices
from pytest_llenergy.energy.meters.select import MeterFacts, MeterRegistry, list_meters
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.entry_points import BrokenEntryPoint
from pytest_llenergy.record.environment import Host

SYSFS = Path("/sys/bus/pci/devices")

#: PCI vendors (pci.ids), and the class of display controllers (PCI Code and ID Assignment, base class 03h).
NVIDIA, AMD = 0x10DE, 0x1002
DISPLAY = 0x03


@dataclass(frozen=True)
class BackendFacts:
    """A backend, the framework it runs in, and why it cannot run (``missing``)."""

    name: str
    missing: str | None
    framework: str | None = None


@dataclass(frozen=True)
class BackendRow:
    """A backend with its capabilities, why it cannot run (``missing``) and how to install it."""

    name: str
    missing: str | None
    install: str
    managed_by: str
    capabilities: Capabilities


def list_broken_backends() -> tuple[BrokenEntryPoint, ...]:
    """Return third-party entry points that provide no backend; one fails every test that needs a backend."""
    return discover_backends()[1]


def list_broken_meters() -> tuple[BrokenEntryPoint, ...]:
    """Return third-party entry points that provide no meter; one prevents every measurement."""
    return MeterRegistry().broken


def list_backend_rows() -> Iterator[BackendRow]:
    """List every known backend with its capabilities."""
    for name, backend in discover_backends()[0].items():
        row = backend.capabilities
        yield BackendRow(name, backend.explain_unavailable(), backend.install, row.managed_by, row)


def list_backends() -> Iterator[BackendFacts]:
    """List every known backend."""
    for name, backend in discover_backends()[0].items():
        yield BackendFacts(name, backend.explain_unavailable(), backend.capabilities.framework)


def list_display_devices(vendor: int, root: Path = SYSFS) -> tuple[str, ...]:
    """Return the PCI addresses of a vendor's display controllers, with or without a driver."""
    found = []
    with suppress(OSError, ValueError):
        for device in sorted(root.iterdir()):
            kind = int((device / "class").read_text(), 16) >> 16
            if kind == DISPLAY and int((device / "vendor").read_text(), 16) == vendor:
                found.append(device.name)
    return tuple(found)


@dataclass(frozen=True)
class Finding:
    """One line: the fault, its evidence, and what to do.

    ``misconfigured`` means that something exists but cannot be used as it is; a host without a GPU is not
    misconfigured.
    """

    text: str
    misconfigured: bool = True


@dataclass(frozen=True)
class GpuFacts:
    """A board. Sizes are bytes, power is watts; None stands for what the driver does not report."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    memory_bytes: int | None
    memory_used_bytes: int | None
    power_limit_w: float | None
    mig_enabled: bool
    instances: tuple[Instance, ...]
    use: BoardUse


@dataclass(frozen=True)
class VisibleGpus:
    """GPUs that the environment allows: the variable's value, their UUIDs, and why others are excluded."""

    value: str | None
    devices: tuple[str, ...] = ()
    reason: str | None = None
    variable: str = VISIBLE_DEVICES


@dataclass(frozen=True)
class Leases:
    """The lock directory, None without a usable one, and a line per process that holds or awaits devices."""

    directory: str | None
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Checkup:
    """Everything that ``llenergy doctor`` reports. ``trials`` are empty until ``run_trials`` has run."""

    host: Host
    driver: str | None
    gpus: tuple[GpuFacts, ...]
    amd: tuple[AmdBoard, ...]
    visible: VisibleGpus
    leases: Leases
    meters: tuple[MeterFacts, ...]
    backends: tuple[BackendFacts, ...]
    model: str
    findings: tuple[Finding, ...] = field(default_factory=tuple)
    trials: tuple[Trial, ...] = ()

    @property
    def misconfigured(self) -> bool:
        """Whether something exists that cannot be used as it is."""
        return any(finding.misconfigured for finding in self.findings)


def check_host(environment: Mapping[str, str] = os.environ, sysfs: Path = SYSFS) -> Checkup:
    """Check everything except the steps that run on devices. A failure becomes a finding.

    Args:
        environment: The environment.
        sysfs: Directory of PCI devices.

    Raises:
        ModelError: The default model is missing.
    """
    from pytest_llenergy.backends.models import resolve_model

    findings: list[Finding] = []
    found = _check_inventory(findings, sysfs)
    gpus, amd = tuple(_check_gpus(found, findings)), _check_amd(findings, sysfs)
    findings.extend(Finding(each.reason) for each in (*list_broken_backends(), *list_broken_meters()))
    return Checkup(
        host=describe_host(),
        driver=found.driver,
        gpus=gpus,
        amd=amd,
        visible=_check_visible(found, environment, findings),
        leases=_check_leases(findings),
        meters=tuple(list_meters([gpu.uuid for gpu in gpus])),
        backends=tuple(list_backends()),
        model=resolve_model(None).label,
        findings=tuple(findings),
    )


def _check_inventory(findings: list[Finding], sysfs: Path) -> Inventory:
    found = read_answering()
    silent = (*found.lost.values(), *found.errors)
    findings.extend(map(Finding, silent))
    if not found.boards and not silent:
        findings.append(_explain_no_boards(found, sysfs))
    return found


def _check_amd(findings: list[Finding], sysfs: Path) -> tuple[AmdBoard, ...]:
    """List AMD boards; AMD SMI is loaded only if the PCI bus has some."""
    found = list_display_devices(AMD, sysfs)
    if not found:
        return ()
    where = ", ".join(found)
    findings.append(
        Finding(
            f"AMD graphics at {where}: gpus(n) leases NVIDIA GPUs only; --energy-meter=amd measures AMD ones",
            misconfigured=False,
        )
    )
    try:
        return list_boards()
    except DeviceError as error:
        findings.append(Finding(f"AMD SMI: {error}", misconfigured=False))
        return ()


def _explain_no_boards(found: Inventory, sysfs: Path) -> Finding:
    """Return a note for a host without a GPU, or a fault if it has one that NVML does not show."""
    nvidia = list_display_devices(NVIDIA, sysfs)
    if find_spec("pynvml") is None:
        return Finding(str(found.driver_missing))
    if not nvidia:
        return Finding(
            f"no NVIDIA GPU: none on the PCI bus; {found.driver_missing or 'NVML shows none'}", False
        )
    where, why = ", ".join(nvidia), found.driver_missing or "NVML shows no board; see nvidia-smi"
    return Finding(
        f"the PCI bus has NVIDIA graphics at {where}, but {why}; in a container, start it with --gpus all"
    )


def _check_gpus(found: Inventory, findings: list[Finding]) -> list[GpuFacts]:
    if not found.boards:
        return []
    facts = []
    session = Session()
    try:
        for board in found.boards:
            parts, divided = found.board_instances(board.uuid), board.uuid in found.mig_enabled
            if divided and not parts:
                findings.append(Finding(f"{board.uuid} is {NO_INSTANCES}"))
            facts.append(
                GpuFacts(
                    index=found.index(board.uuid),
                    uuid=board.uuid,
                    name=board.name,
                    pci_bus_id=board.pci_bus_id,
                    memory_bytes=board.memory_bytes,
                    memory_used_bytes=found.used_bytes.get(board.uuid),
                    power_limit_w=board.power_limit_w,
                    mig_enabled=divided,
                    instances=parts,
                    use=inspect_board(session, session.open_board(board.uuid)),
                )
            )
    finally:
        session.close()
    return facts


def _check_visible(found: Inventory, environment: Mapping[str, str], findings: list[Finding]) -> VisibleGpus:
    value = environment.get(VISIBLE_DEVICES)
    if not found.boards:
        return VisibleGpus(value)
    try:
        visible = parse_visible_devices(environment, found)
        leasable = list_leasable(found, None, environment)
    except DeviceError as error:
        findings.append(Finding(str(error)))
        return VisibleGpus(value, reason=str(error))
    if visible.reason is not None:
        # An empty list hides all GPUs on purpose and has no reason; a name that matches nothing is an error.
        findings.append(
            Finding(f"{VISIBLE_DEVICES}={value!r}: {visible.reason}; llenergy doctor lists the UUIDs")
        )
    return VisibleGpus(value, leasable.uuids, leasable.reason)


def _check_leases(findings: list[Finding]) -> Leases:
    try:
        directory = open_lock_directory()
    except DeviceError as error:
        findings.append(Finding(str(error)))
        return Leases(None, ())
    try:
        findings.extend(starmap(Finding, describe_left_changes(directory)))
        return Leases(str(directory.path), tuple(describe_leases(directory)))
    finally:
        directory.close()
