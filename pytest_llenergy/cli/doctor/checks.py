# SPDX-License-Identifier: Apache-2.0
"""What ``llenergy doctor`` checks. What asks a driver or imports a library runs in a process of its own.

A driver that hangs, or a library that dies, then takes one check with it. This module is also the program of
these processes: it prints each line as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest_llenergy
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.registry import discover_backends
from pytest_llenergy.cli.running_total import RunningTotal
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.amd_smi import is_amd
from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.environment import installed_version
from pytest_llenergy.devices.holders import describe_leases
from pytest_llenergy.devices.inventory import Inventory, find_gpus
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.nvml import Session, read_used_bytes
from pytest_llenergy.devices.occupancy import inspect_board
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.devices.timeouts import KILL_TIMEOUT_S, QUERY_TIMEOUT_S
from pytest_llenergy.devices.visibility import VISIBLE_DEVICES, describe_settings, parse_visible_devices
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterFacts, MeterRegistry, list_meters, open_meters
from pytest_llenergy.energy.sampler import Sampler
from pytest_llenergy.energy.timeouts import TICK_TIMEOUT_S
from pytest_llenergy.energy.trace import NEIGHBOURS
from pytest_llenergy.errors import DeviceError, LLEnergyError, MeterError
from pytest_llenergy.lifetime import module_command

if TYPE_CHECKING:
    from pytest_llenergy.hosts.launchers import Cluster, HostOffer
    from pytest_llenergy.record.environment import Board

#: PCI vendors (pci.ids), and the class of display controllers (PCI Code and ID Assignment, base class 03h).
NVIDIA, AMD, DISPLAY = 0x10DE, 0x1002, 0x03

#: Time of a trial measurement, of all meters, and of an import from a cold network disk (seconds).
TRIAL_S, METERS_TIMEOUT_S, IMPORT_TIMEOUT_S = 0.5, 60.0, 120.0

#: How long to wait for a host that others use, and for a host to list its meters (seconds).
BUSY_TIMEOUT_S = 5.0

#: How the launcher of a cluster gets GPUs that it does not count.
ADD_GPUS = {"slurm": "start the job with --gres=gpu:N", "ray": "start Ray there with --num-gpus=N"}


@dataclass(frozen=True)
class Line:
    """One finding. ``wrong`` as topic means that something is here and cannot be used as it is."""

    topic: str
    text: str


def check_machine(*, steps: bool) -> Iterator[Line]:
    """Check everything; with ``steps``, also measure with each meter and import the backends' libraries."""
    host = describe_host()
    versions = f"{platform.python_version()}, pytest-llenergy {pytest_llenergy.__version__}"
    yield Line("python", f"{versions}, pytest {installed_version('pytest')}")
    yield Line("cpu", f"{host.cpu_model}, {host.logical_cpus} logical CPUs")
    driver = "see nvidia-smi, and the kernel's log (dmesg)"
    answered = [*_run_check("gpus", timeout_s=QUERY_TIMEOUT_S, remedy=driver)]
    yield from answered
    yield from _run_check("leases", timeout_s=QUERY_TIMEOUT_S, remedy=driver)
    trial = ("trial",) if steps else ()
    yield from _run_check("meters", *trial, timeout_s=METERS_TIMEOUT_S, remedy=driver)
    specs, broken = discover_backends()
    for name, spec in specs.items():
        missing = spec.explain_unavailable()
        if missing is not None:
            yield Line("backend", f"{name}: {missing.removeprefix(f'{name} is ')}")
        elif steps:
            yield from _run_check("backend", name, timeout_s=IMPORT_TIMEOUT_S, remedy=spec.install)
        else:
            yield Line("backend", f"{name}: installed ({_versions(spec)})")
    topics = {line.topic for line in answered}
    if steps and "driver" in topics and "wrong" not in topics and find_spec("torch"):
        yield from _run_check("torch", timeout_s=IMPORT_TIMEOUT_S, remedy="reinstall torch")
    yield Line("model", f"{resolve_model(None).label} (default)")
    yield from (Line("wrong", each.reason) for each in (*broken, *MeterRegistry().broken))


def _run_check(name: str, *arguments: str, timeout_s: float, remedy: str) -> Iterator[Line]:
    """Run a check in a process of its own, and yield what it found before it ended, died or hung."""
    command = module_command(__name__, str(timeout_s), name, *arguments)
    # In a session of its own, it can be killed with whatever it has started.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    fault = None
    try:
        out, err = process.communicate(timeout=timeout_s)
        if process.returncode < 0:
            fault = f"ended by {signal.Signals(-process.returncode).name}"
        elif process.returncode:
            fault = err.decode(errors="replace").strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired as error:
        fault, out = f"no answer within {timeout_s:g} s", error.stdout or b""
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                out, _ = process.communicate(timeout=KILL_TIMEOUT_S)
    yield from (Line(**json.loads(line)) for line in out.split(b"\n")[:-1])
    if fault is not None:
        yield Line("wrong", f"{' '.join((name, *arguments[:1]))}: {fault}; {remedy}")


def _check_gpus() -> Iterator[Line]:
    found = find_gpus()
    if found.driver is not None:
        yield Line("driver", found.driver)
    yield from _list_gpus(found)
    yield from (Line("wrong", reason) for reason in found.faults)
    if not (found.boards or found.faults):
        yield _explain_no_gpus(found)
    yield from _list_visible(found)
    where = ", ".join(list_display_devices(AMD))
    if where and not any(map(is_amd, found.uuids)):
        advice = "pip install 'pytest-llenergy[amd]', to lease and measure it"
        yield Line("note", f"AMD graphics at {where}, but AMD SMI shows none; {advice}")


def _list_gpus(found: Inventory) -> Iterator[Line]:
    for board in (each for each in found.boards if is_amd(each.uuid)):
        facts = f"{format_memory(board.memory_bytes)}, {_format_limit(board.power_limit_w)}"
        yield Line(f"gpu {found.index(board.uuid)}", f"{board.name} {board.uuid}, {facts}")
    nvidia = [board for board in found.boards if not is_amd(board.uuid)]
    if not nvidia:
        return
    session = Session()
    with closing(session):
        for board in nvidia:
            opened = session.open_board(board.uuid)
            use, used_bytes = inspect_board(session, opened), read_used_bytes(session.module, opened.device)
            used, total = format_memory(used_bytes), format_memory(board.memory_bytes)
            facts = f"{used} of {total} in use, {_format_limit(board.power_limit_w)}"
            gpu = f"gpu {found.index(board.uuid)}"
            yield Line(gpu, f"{board.name} {board.uuid}, PCI {board.pci_bus_id}, {facts}")
            if use.state == "unknown":
                yield Line(gpu, f"other processes are unknown: {use.unknown}")
            elif use.state == "busy":
                yield Line(gpu, use.users)
            if use.displays:
                yield Line(gpu, f"a display: {', '.join(map(str, use.displays))}")
            for part in found.board_instances(board.uuid):
                yield Line(gpu, f"MIG instance {part.label}, {format_memory(part.memory_bytes)}")


def _format_limit(watts: float | None) -> str:
    return "unknown power limit" if watts is None else f"limit {watts:g} W"


def _explain_no_gpus(found: Inventory) -> Line:
    where, why = ", ".join(list_display_devices(NVIDIA)), found.driver_missing or "NVML shows no GPU"
    if find_spec("pynvml") is None:
        return Line("wrong", why)
    if where:
        advice = "see nvidia-smi; in a container, start it with --gpus all"
        return Line("wrong", f"the PCI bus has NVIDIA graphics at {where}, but {why}; {advice}")
    return Line("gpu", f"none: no NVIDIA GPU on the PCI bus; {why}")


def list_display_devices(vendor: int, root: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the PCI addresses of a vendor's display controllers, with or without a driver."""
    found = []
    with suppress(OSError, ValueError):
        for device in sorted(root.iterdir()):
            kind = int((device / "class").read_text(), 16) >> 16
            if kind == DISPLAY and int((device / "vendor").read_text(), 16) == vendor:
                found.append(device.name)
    return found


def _list_visible(found: Inventory) -> Iterator[Line]:
    shown = describe_settings(os.environ, found) or f"{VISIBLE_DEVICES} is not set"
    if not found.boards:
        yield Line("visible", f"{shown}: no GPU")
        return
    try:
        visible, leasable = parse_visible_devices(os.environ, found), list_leasable(found, None, os.environ)
    except DeviceError as error:
        yield Line("wrong", str(error))
        return
    reason = f" ({leasable.reason})" if leasable.reason else ""
    yield Line("visible", f"{shown}: {', '.join(leasable.uuids) or 'no GPU'}{reason}")
    if visible.reason is not None:
        # An empty list hides all GPUs on purpose and has no reason; a name that matches nothing is an error.
        yield Line("wrong", f"{shown}: {visible.reason}; the UUIDs are above")


def _check_leases() -> Iterator[Line]:
    with closing(open_lock_directory()) as directory:
        holders = describe_leases(directory)
        yield Line("leases", f"{directory.path}: {len(holders) or 'none'}")
        yield from (Line("lease", holder) for holder in holders)


def _check_meters(trial: str = "") -> Iterator[Line]:
    # The CPU comes first: a driver that hangs then hides the meters of its GPUs only.
    yield from _list_meters(Targets(), trial)
    for uuid in find_gpus().uuids:
        yield from _list_meters(Targets((uuid,)), trial)


def _list_meters(targets: Targets, trial: str) -> Iterator[Line]:
    for name, group in groupby(list_meters(targets), key=lambda meter: meter.name):
        facts = list(group)
        powers = [""] * len(facts)
        if trial and facts[0].available:
            try:
                powers = _try_meter(name, targets)
            except MeterError as error:
                powers = [f"; no energy in a trial: {error}"] * len(facts)
        for meter, power in zip(facts, powers, strict=True):
            yield Line("meter", f"{describe_meter(meter)}{power}")


def _try_meter(name: str, targets: Targets) -> list[str]:
    """Measure for a moment. Returns the power of each domain, or why it has none."""
    selection = open_meters([name], MeterRegistry(skip_broken=True), targets)
    with Sampler(selection.meters) as sampler:
        sampler.await_ticks(0, TICK_TIMEOUT_S)
        totals, start_ns = [RunningTotal(series) for series in sampler.series], time.monotonic_ns()
        period_s = max(each.series.domain.update_period_s or 0.0 for each in totals)
        end_ns = start_ns + round(max(TRIAL_S, NEIGHBOURS * period_s) * 1e9)
        # An estimate needs work to measure, which leaves the interpreter to the sampler.
        while time.monotonic_ns() < end_ns:
            crc32(bytes(1 << 20))
        sampler.await_ticks(end_ns, TICK_TIMEOUT_S, NEIGHBOURS)
        powers = [total.add(start_ns, end_ns) for total in totals]
    return [
        f"; no energy in a trial: {total.reason}" if power is None else f"; {power:.1f} W in a trial"
        for total, power in zip(totals, powers, strict=True)
    ]


def describe_meter(meter: MeterFacts) -> str:
    """Return what a meter reads, or why it cannot."""
    if meter.target is None:
        return f"{meter.name}: {meter.detail}"
    reason = meter.detail.removeprefix(f"{meter.name}: ")
    return f"{meter.name} for {meter.target}: {meter.detail if meter.available else f'no ({reason})'}"


def _import_backend(name: str) -> Iterator[Line]:
    spec, start_s = discover_backends()[0][name], time.monotonic()
    for module in spec.requires:
        import_module(module)
    yield Line(
        "backend", f"{name}: installed ({_versions(spec)}), imported in {time.monotonic() - start_s:.1f} s"
    )


def _versions(spec: BackendSpec) -> str:
    return ", ".join(f"{name} {installed_version(name) or 'of unknown version'}" for name in spec.requires)


def _try_torch() -> Iterator[Line]:
    """Initialise CUDA in torch, if a GPU is visible. This allocates nothing there, so it needs no lease."""
    if not list_leasable(find_gpus(), None, os.environ).uuids:
        return
    import torch

    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        yield Line("wrong", f"{build} is built without CUDA; get another at https://pytorch.org/get-started")
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        yield Line(
            "wrong", f"{build}: {text}; update the driver, or get a torch for CUDA as old as the driver's"
        )
        return
    names = ", ".join(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count()))
    yield Line("torch", f"{torch.__version__} for CUDA {torch.version.cuda} sees {names}")


def check_cluster(name: str) -> Iterator[Line]:
    """Check each host of a cluster in turn: versions, GPUs, meters.

    Args:
        name: ``slurm``, ``ray`` or ``ray:HOST:PORT``.
    """
    from pytest_llenergy.hosts.gangs import open_cluster

    try:
        with closing(open_cluster(name, os.environ)) as cluster:
            offers = cluster.offers()
            add = "" if any(offer.devices for offer in offers) else ADD_GPUS[name.partition(":")[0]]
            for offer in offers:
                avoid = {each.name: "another host is checked" for each in offers if each is not offer}
                try:
                    versions, boards, meters = _describe_host(cluster, offer, avoid)
                except LLEnergyError as error:
                    yield Line("wrong", f"{offer.name} cannot be used: {error}")
                    continue
                shown = ", ".join(f"{package} {version}" for package, version in versions.items())
                gpus = ", ".join(board.name for board in boards) or "none"
                able = [each for each in meters if each.available]
                kinds = dict.fromkeys(f"{each.name} ({each.detail.partition(',')[0]})" for each in able)
                able_to = ", ".join(kinds) or "none"
                yield Line("host", f"{offer.name}: {shown}; GPUs: {gpus}; meters: {able_to}")
                found = len(boards)
                if found < offer.devices or (found and add):
                    counted = f"{offer.devices} GPUs for the launcher, {found} that the driver shows"
                    yield Line("wrong", "; ".join(filter(None, (f"{offer.name}: {counted}", add))))
    except LLEnergyError as error:
        yield Line("wrong", str(error))


def _describe_host(
    cluster: Cluster, offer: HostOffer, avoid: Mapping[str, str]
) -> tuple[Mapping[str, str], Sequence[Board], Sequence[MeterFacts]]:
    from pytest_llenergy.hosts.launchers import Shape

    gang = cluster.gang(Shape(1, offer.devices), BUSY_TIMEOUT_S, lambda _: None, avoid)
    with closing(gang):
        (host,) = gang.hosts
        return (host.facts.versions, *host.call("ranks.inventory", METERS_TIMEOUT_S))


CHECKS: dict[str, Callable[..., Iterator[Line]]] = {
    "gpus": _check_gpus,
    "leases": _check_leases,
    "meters": _check_meters,
    "backend": _import_backend,
    "torch": _try_torch,
}


def _main(timeout_s: str, name: str, *arguments: str) -> None:
    # A process whose parent was killed ends all the same.
    signal.alarm(int(float(timeout_s)) + 5)
    # What libraries print must not come between the lines.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        try:
            for line in CHECKS[name](*arguments):
                print(json.dumps(asdict(line)), file=lines, flush=True)
        except LLEnergyError as error:
            print(json.dumps(asdict(Line("wrong", str(error)))), file=lines, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
