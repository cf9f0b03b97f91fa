# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds: driver, boards, meters, backends, leases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.registry import discover_backends
from pytest_llenergy.devices import lockfiles
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.amd import AmdBoard, list_boards
from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.inventory import Inventory, read_answering
from pytest_llenergy.devices.lease import CPU
from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.devices.mig import NO_INSTANCES, Instance
from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.devices.occupancy import BoardUse, inspect_board
from pytest_llenergy.devices.queue import describe_entries, list_entries
from pytest_llenergy.devices.visibility import VISIBLE_DEVICES, parse_visible_devices
from pytest_llenergy.doctor.steps import Trial
from pytest_llenergy.errors import DeviceError, MeterDoesNotApply, MeterError
from pytest_llenergy.meters.base import Domain, MeterSpec, Targets
from pytest_llenergy.meters.select import MeterRegistry
from pytest_llenergy.model.entry_points import BrokenEntryPoint
from pytest_llenergy.model.environment import Host

# What can measure and what can run here.


@dataclass(frozen=True)
class MeterFacts:
    """A meter for one target, ``cpu`` or a UUID; ``None`` for one that has to be told what to read."""

    name: str
    target: str | None
    available: bool
    detail: str


@dataclass(frozen=True)
class BackendFacts:
    """A backend; ``missing`` is why it cannot run, and what to do. ``framework`` is what it runs in."""

    name: str
    missing: str | None
    framework: str | None = None


@dataclass(frozen=True)
class BackendRow:
    """A backend with its capability row. ``missing`` is why it cannot run here, ``install`` what mends it."""

    name: str
    missing: str | None
    install: str
    managed_by: str
    capabilities: Capabilities


def list_broken_backends() -> tuple[BrokenEntryPoint, ...]:
    """Entry points of others that give no backend; every test that asks for a backend fails by one."""
    return discover_backends()[1]


def list_broken_meters() -> tuple[BrokenEntryPoint, ...]:
    """Entry points of others that give no meter; no test can be measured until they are mended."""
    return MeterRegistry().broken


def list_backend_rows() -> Iterator[BackendRow]:
    """The row of every known backend."""
    for name, backend in discover_backends()[0].items():
        row = backend.capabilities
        yield BackendRow(name, backend.missing(), backend.install, row.managed_by, row)


def list_backends() -> Iterator[BackendFacts]:
    """Every known backend."""
    for name, backend in discover_backends()[0].items():
        yield BackendFacts(name, backend.missing(), backend.capabilities.framework)


def list_meters(uuids: Sequence[str]) -> Iterator[MeterFacts]:
    """Every known meter, opened for the CPU and for each GPU that it applies to."""
    for name, meter in MeterRegistry(whole_only=True).items():
        if meter.takes_argument:
            yield MeterFacts(name, None, False, f"by name only, --energy-meter={name}:ARGUMENT")
            continue
        for targets in [Targets(), *(Targets((uuid,)) for uuid in uuids)]:
            yield from _open_meter(name, meter, targets)


def _open_meter(name: str, meter: MeterSpec, targets: Targets) -> Iterator[MeterFacts]:
    target = targets.gpus[0] if targets.gpus else "cpu"
    try:
        found = meter.open(targets)
    except MeterDoesNotApply:
        return
    except MeterError as error:
        yield MeterFacts(name, target, False, str(error))
        return
    for each in found:
        each.close()
        for domain in each.domains:
            yield MeterFacts(name, target, True, _describe_domain(domain))


def _describe_domain(domain: Domain) -> str:
    """What it reads, how often it ticks, how much of the time it looks, what is odd."""
    period = f", every {domain.update_period_s * 1e3:.4g} ms" if domain.update_period_s else ""
    sees = f", sees {domain.coverage:.0%} of the time" if domain.coverage < 1 else ""
    odd = "".join(f"; {flag.name}: {flag.detail}" for flag in domain.flags)
    return f"{domain.kind}, {domain.name} by {domain.source}{period}{sees}{odd}"


# GPUs that the kernel sees on the PCI bus, driver or not.

SYSFS = Path("/sys/bus/pci/devices")

#: PCI vendors (pci.ids), and the class of display controllers (PCI Code and ID Assignment, base class 03h).
NVIDIA, AMD = 0x10DE, 0x1002
DISPLAY = 0x03


def list_display_devices(vendor: int, root: Path = SYSFS) -> tuple[str, ...]:
    """PCI addresses of the vendor's display controllers; empty where the bus cannot be read."""
    found = []
    with suppress(OSError, ValueError):
        for device in sorted(root.iterdir()):
            kind = int((device / "class").read_text(), 16) >> 16
            if kind == DISPLAY and int((device / "vendor").read_text(), 16) == vendor:
                found.append(device.name)
    return tuple(found)


# What the doctor finds, as plain data; nothing here prints.


@dataclass(frozen=True)
class Finding:
    """One line: what is missing or wrong, what was found, what to do.

    ``misconfigured``: something is here and cannot be used as it stands. That a host has no GPU is no fault.
    """

    text: str
    misconfigured: bool = True


@dataclass(frozen=True)
class GpuFacts:
    """One board. Memory is bytes, power is watts; what the driver does not tell is ``None``."""

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
    """What the environment allows: the variable's value, if it is set, and the UUIDs that this leaves."""

    value: str | None
    devices: tuple[str, ...] = ()
    reason: str | None = None
    variable: str = VISIBLE_DEVICES


@dataclass(frozen=True)
class Leases:
    """Where leases are agreed on, and who holds or awaits one; ``None`` where there is no such place."""

    directory: str | None
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Checkup:
    """Everything that ``llenergy doctor`` says. ``trials`` are empty until ``tour`` has made them."""

    host: Host
    driver: str | None
    gpus: tuple[GpuFacts, ...]
    amd: tuple[AmdBoard, ...]
    allotment: VisibleGpus
    leases: Leases
    meters: tuple[MeterFacts, ...]
    engines: tuple[BackendFacts, ...]
    model: str
    findings: tuple[Finding, ...] = field(default_factory=tuple)
    trials: tuple[Trial, ...] = ()

    @property
    def misconfigured(self) -> bool:
        """Whether anything that is here cannot be used as it stands."""
        return any(finding.misconfigured for finding in self.findings)


def check_host(environment: Mapping[str, str] = os.environ, sysfs: Path = SYSFS) -> Checkup:
    """Look at everything. What fails becomes a finding; raises ``ModelError`` without the default model."""
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
        allotment=_check_visible(found, environment, findings),
        leases=_check_leases(found, findings),
        meters=tuple(list_meters([gpu.uuid for gpu in gpus])),
        engines=tuple(list_backends()),
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
    """Boards of AMD, asked for only where the bus has some."""
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
    """A host without a GPU is in order; one with a GPU that NVML does not show is not."""
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
            parts, divided = found.instances_of(board.uuid), board.uuid in found.mig_enabled
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
        seen, may = parse_visible_devices(environment, found), list_leasable(found, None, environment)
    except DeviceError as error:
        findings.append(Finding(str(error)))
        return VisibleGpus(value, reason=str(error))
    if seen.reason is not None:
        # To hide all GPUs is somebody's decision and has no reason; a name that fits nothing is an error.
        findings.append(
            Finding(f"{VISIBLE_DEVICES}={value!r}: {seen.reason}; llenergy doctor lists the UUIDs")
        )
    return VisibleGpus(value, may.uuids, may.reason)


def _check_leases(found: Inventory, findings: list[Finding]) -> Leases:
    try:
        directory = open_lock_directory()
    except DeviceError as error:
        findings.append(Finding(str(error)))
        return Leases(None, ())
    try:
        findings.extend(_check_lock_files(found, directory))
        return Leases(
            str(directory.path),
            tuple(describe_entries(list_entries(directory, ("holding", "waiting", "firm")))),
        )
    finally:
        directory.close()


def _check_lock_files(found: Inventory, directory: LockDirectory) -> Iterator[Finding]:
    """What stands in the place of a device's lock file and fails every test that asks for it."""
    boards = [board.uuid for board in found.boards]
    instances = [part.uuid for board in boards for part in found.instances_of(board)]
    for device in (CPU, *boards, *instances):
        try:
            lockfiles.check_lock_file(directory, device)
        except DeviceError as error:
            yield Finding(f"{device}: {error}")
