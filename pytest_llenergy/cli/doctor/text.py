# SPDX-License-Identifier: Apache-2.0
"""Render a checkup as text, one fact per line so that lines can be searched and pasted.

The words for capabilities are the same in the terminal and in the documentation.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_llenergy.backends.base import DEGREES, Capabilities
from pytest_llenergy.cli.doctor.checkup import (
    BackendFacts,
    BackendRow,
    Checkup,
    Finding,
    GpuFacts,
    Leases,
    VisibleGpus,
)
from pytest_llenergy.cli.doctor.steps import VERSIONS, Step, Trial
from pytest_llenergy.devices.amd import AmdBoard
from pytest_llenergy.devices.occupancy import describe_process
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.energy.meters.select import MeterFacts
from pytest_llenergy.record.entry_points import BrokenEntryPoint

if TYPE_CHECKING:
    from pytest_llenergy.cli.doctor.hosts import Bandwidth, HostCheckup

UNKNOWN = "not stated"
NEVER_RUN = "not run on hardware"

#: How the reasons and sources of refused load options begin.
REFUSED = "options_"

INDENT = " " * 9


@dataclass(frozen=True)
class Fact:
    """A capability in words, with the name of its field and the source of the statement."""

    name: str
    title: str
    value: str
    reason: str | None = None
    source: str = UNKNOWN

    @property
    def text(self) -> str:
        """Value, with the reason if there is one."""
        return f"{self.value}: {self.reason}" if self.reason else self.value


def list_facts(row: Capabilities) -> Iterator[Fact]:
    """List every capability that a test can require or a reader must know, in the order of the table.

    The load options that are refused for a reason follow the others.
    """
    for name, title, value in _values(row):
        yield Fact(name, title, value, row.reasons.get(name), row.sources.get(name, UNKNOWN))
        if name == "options":
            for refused, reason in row.reasons.items():
                if refused.startswith(REFUSED):
                    option = refused.removeprefix(REFUSED)
                    yield Fact(refused, f"option {option}", "no", reason, row.sources.get(refused, UNKNOWN))


def _values(row: Capabilities) -> Iterator[tuple[str, str, str]]:
    yield "launch", "launch", _launch(row)
    yield "hosts", "hosts of one model", _hosts(row)
    yield "managed_by", "devices assigned by", row.managed_by
    yield "cpu", "CPU", _yes(row.cpu)
    yield "gpu", "NVIDIA GPUs", _yes(row.gpu)
    for kind in DEGREES:
        yield kind, kind, _yes(getattr(row, kind))
    yield "tasks", "tasks", _list(row.tasks)
    yield "batching", "batching", _list(row.batching)
    yield "prefix_cache", "prefix cache", row.prefix_cache
    yield "caches", "key-value caches", _list(row.caches)
    yield "timestamps", "timestamps", _timestamps(row)
    yield "options", "load options", _list(row.options)
    yield "passes", "other options", row.passes or "none"
    yield "sampling", "beams, penalties", _list(row.sampling)
    yield "hardware", "run on", row.hardware or NEVER_RUN


def _launch(row: Capabilities) -> str:
    if row.launch == "ranks":
        return "ranks, one a device"
    if row.opaque:
        return "backend, on all devices"
    return "backend"


def _hosts(row: Capabilities) -> str:
    return "several" if row.launch == "ranks" and (row.tensor or row.pipeline) else row.hosts


def _timestamps(row: Capabilities) -> str:
    if row.timestamps == "none":
        return "none"
    return f"each {row.timestamps}, {'exact' if row.exact else 'not exact'}; {row.clock}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _list(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "none"


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap a line between words, for a terminal with so many columns."""
    indent = f"{INDENT}  "
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def render_checkup(checkup: Checkup) -> Iterator[str]:
    """Render what the host has, then what is wrong."""
    yield f"cpu      {checkup.host.cpu_model}, {checkup.host.logical_cpus} logical CPUs"
    if checkup.driver is not None:
        yield f"driver   {checkup.driver}"
    for gpu in checkup.gpus:
        yield from _render_gpu(gpu)
    for board in checkup.amd:
        yield from _render_amd(board)
    if not checkup.gpus and not checkup.amd:
        yield "gpu      none"
    yield f"visible  {_render_visible(checkup.visible)}"
    yield from _render_leases(checkup.leases)
    for meter in checkup.meters:
        yield f"meter    {_render_meter(meter)}"
    for backend in checkup.backends:
        yield render_backend(backend)
    yield f"model    {checkup.model} (default)"
    yield from map(render_finding, checkup.findings)


def render_host_of_cluster(host: HostCheckup) -> Iterator[str]:
    """Render a host of a cluster, and what differs from pytest's host."""
    if host.facts is None or host.clock_bound_s is None:
        yield f"host     {host.name}: cannot be used: {host.fault}"
        return
    facts = host.facts
    packages = "".join(f", {name} {version}" for name, version in facts.packages.items())
    yield f"host     {host.name}: Python {facts.python}, pytest-llenergy {facts.plugin}{packages}"
    for board in facts.devices:
        yield f"{INDENT}gpu {board.uuid}: {board.name}, {format_memory(board.memory_bytes)}"
    if host.shortage is not None:
        yield f"{INDENT}wrong: GPUs: {host.shortage}"
    else:
        yield from (f"{INDENT}gpu none: {each}" for each in ([] if facts.devices else facts.devices_missing))
    # Reasons are the same on all hosts, and matter only where nothing can be measured.
    alike: dict[str, list[MeterFacts]] = {}
    for meter in [each for each in facts.meters if each.available] or facts.meters:
        # Alike on all boards but for their names and for digits of their measured periods.
        text = _render_meter(meter).replace(meter.target or "\0", "").partition(", every ")[0]
        alike.setdefault(text, []).append(meter)
    for first, *others in alike.values():
        more = f"; likewise {len(others)} more GPU{'s' * (len(others) > 1)}" if others else ""
        yield f"{INDENT}meter {_render_meter(first)}{more}"
    yield f"{INDENT}clock: its difference is known within {host.clock_bound_s * 1e6:.3g} µs"
    for setting in host.unlike_pytest:
        yield f"{INDENT}{setting}"


def render_bandwidth(bandwidth: Bandwidth) -> str:
    """Render the bandwidth between the hosts of a cluster."""
    if bandwidth.bytes_per_s is None:
        return f"network  not measured: {bandwidth.missing or bandwidth.fault}"
    speed = f"{bandwidth.bytes_per_s / 1e9:.3g} GB/s"
    size = f"{bandwidth.size_bytes >> 20} MiB"
    return f"network  {speed} by gloo, all_reduce of {size} over {', '.join(bandwidth.hosts)}"


def render_backend(backend: BackendFacts) -> str:
    """Render whether a backend can run, as far as known before the steps."""
    return f"backend  {_render_availability(backend.name, backend.missing)}"


def render_row(row: BackendRow) -> Iterator[str]:
    """Render the capabilities of a backend, one per line, each with its source in brackets."""
    yield f"backend  {_render_availability(row.name, row.missing)}"
    for fact in list_facts(row.capabilities):
        yield f"{INDENT}{fact.title:<22} {fact.text} [{fact.source}]"


def _render_availability(name: str, missing: str | None) -> str:
    """Render whether a backend is installed, or why not."""
    return f"{name}: {missing.removeprefix(f'{name} is ') if missing else 'installed'}"


def render_broken(broken: BrokenEntryPoint) -> str:
    """Render an entry point that provides no backend, in place of its capabilities."""
    return f"backend  {broken.name}: broken: {broken.reason}"


def render_finding(finding: Finding) -> str:
    """Render a fault or a note."""
    return f"{'wrong' if finding.misconfigured else 'note':<9}{finding.text}"


def render_step(step: Step) -> str:
    """Render a step."""
    if step.state == "skipped":
        return f"step     {step.name}: skipped ({step.detail})"
    took = "" if step.duration_s is None else f" {_show_duration(step.duration_s)}"
    if step.state == "failed":
        return f"step     {step.name}: failed after{took} ({step.detail})"
    learned = "".join(f", {VERSIONS[name].format(version)}" for name, version in step.versions.items())
    return f"step     {step.name}: ok,{took}{learned} ({step.detail})"


def render_trial(trial: Trial) -> str:
    """Render all steps on one device in one line."""
    failed = trial.first_failure
    if trial.not_run_reason is not None:
        how = f"not run, {trial.not_run_reason}"
    elif failed is not None:
        how = render_step(failed).removeprefix("step").strip()
    else:
        last = [step.name for step in trial.steps if step.state == "ok"][-1]
        how = f"ok up to {last}, {_show_duration(trial.duration_s)}"
    return f"steps    on {trial.device_name}: {how}"


def _show_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _render_gpu(gpu: GpuFacts) -> Iterator[str]:
    yield f"gpu {gpu.index:<5}{gpu.name} {gpu.uuid}"
    watts = "unknown power limit" if gpu.power_limit_w is None else f"limit {gpu.power_limit_w:g} W"
    used, total = format_memory(gpu.memory_used_bytes), format_memory(gpu.memory_bytes)
    mode = "on" if gpu.mig_enabled else "off"
    yield f"{INDENT}PCI {gpu.pci_bus_id}, {used} of {total} in use, {watts}, MIG {mode}"
    for part in gpu.instances:
        yield f"{INDENT}instance {part.label}, {format_memory(part.memory_bytes)}"
    if gpu.use.state == "unknown":
        yield f"{INDENT}other processes are unknown: {gpu.use.reason}"
    elif gpu.use.processes:
        yield from (f"{INDENT}{describe_process(process)}" for process in gpu.use.processes)
    elif gpu.use.state == "busy":
        yield f"{INDENT}{format_memory(gpu.use.memory_bytes)} in use by no process that is visible from here"


def _render_amd(board: AmdBoard) -> Iterator[str]:
    yield f"amd      {board.name or 'a board without a name'} {board.uuid}"
    watts = "unknown power limit" if board.power_limit_w is None else f"limit {board.power_limit_w:g} W"
    used, total = format_memory(board.memory_used_bytes), format_memory(board.memory_bytes)
    yield f"{INDENT}PCI {board.pci_bus_id or 'unknown'}, {used} of {total} in use, {watts}"
    for pid in board.processes or ():
        yield f"{INDENT}process {pid}"


def _render_visible(visible: VisibleGpus) -> str:
    value = "is not set" if visible.value is None else f"is {visible.value!r}"
    reason = f" ({visible.reason})" if visible.reason else ""
    return f"{visible.variable} {value}: {', '.join(visible.devices) or 'no GPU'}{reason}"


def _render_leases(leases: Leases) -> Iterator[str]:
    if leases.directory is None:
        return
    yield f"leases   {leases.directory}: {len(leases.holders) or 'none'}"
    yield from (f"{INDENT}{holder}" for holder in leases.holders)


def _render_meter(meter: MeterFacts) -> str:
    if meter.target is None:
        return f"{meter.name}: {meter.detail}"
    reason = meter.detail.removeprefix(f"{meter.name}: ")
    return f"{meter.name} for {meter.target}: {meter.detail if meter.available else f'no ({reason})'}"
