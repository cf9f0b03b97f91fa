# SPDX-License-Identifier: Apache-2.0
"""The findings as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_llenergy.backends.base import DEGREES, Capabilities
from pytest_llenergy.devices.amd import AmdBoard
from pytest_llenergy.devices.occupancy import describe_process
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.doctor.checkup import (
    BackendFacts,
    BackendRow,
    Checkup,
    Finding,
    GpuFacts,
    Leases,
    MeterFacts,
    VisibleGpus,
)
from pytest_llenergy.doctor.steps import VERSIONS, Step, Trial
from pytest_llenergy.model.entry_points import BrokenEntryPoint

# A capability row in words, the same in the terminal and in the documentation.

UNKNOWN = "not said"
NEVER_RUN = "not run on hardware"


@dataclass(frozen=True)
class Fact:
    """One field of a row. ``name`` is that of the field, ``source`` how it is known."""

    name: str
    title: str
    value: str
    reason: str | None = None
    source: str = UNKNOWN

    @property
    def text(self) -> str:
        """The value, with the reason where the row gives one."""
        return f"{self.value}: {self.reason}" if self.reason else self.value


def list_facts(row: Capabilities) -> Iterator[Fact]:
    """Every field that a test can ask for or a reader must know, in the order of the table."""
    for name, title, value in _values(row):
        yield Fact(name, title, value, row.reasons.get(name), row.sources.get(name, UNKNOWN))


def _values(row: Capabilities) -> Iterator[tuple[str, str, str]]:
    yield "launch", "launch", _launch(row)
    yield "managed_by", "devices shared out by", row.managed_by
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
    yield "hardware", "run on", row.hardware or NEVER_RUN


def _launch(row: Capabilities) -> str:
    if row.launch == "ranks":
        return "ranks, one a device"
    if not row.data:
        return "engine"
    return f"engine; copies by {'the plugin' if row.replicas == 'plugin' else 'the engine'}"


def _timestamps(row: Capabilities) -> str:
    if row.timestamps == "none":
        return "none"
    return f"each {row.timestamps}, {'exact' if row.exact else 'not exact'}; {row.clock}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _list(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "none"


# The findings as lines of text, one fact a line, so that they can be searched and pasted.

INDENT = " " * 9


def render_checkup(checkup: Checkup) -> Iterator[str]:
    """What is here first, then what is wrong."""
    yield f"cpu      {checkup.host.cpu_model}, {checkup.host.logical_cpus} logical CPUs"
    if checkup.driver is not None:
        yield f"driver   {checkup.driver}"
    for gpu in checkup.gpus:
        yield from _render_gpu(gpu)
    for board in checkup.amd:
        yield from _render_amd(board)
    if not checkup.gpus and not checkup.amd:
        yield "gpu      none"
    yield f"allotted {_render_visible(checkup.allotment)}"
    yield from _render_leases(checkup.leases)
    for meter in checkup.meters:
        yield f"meter    {_render_meter(meter)}"
    for engine in checkup.engines:
        yield render_backend(engine)
    yield f"model    {checkup.model} (default)"
    yield from map(render_finding, checkup.findings)


def render_backend(engine: BackendFacts) -> str:
    """Whether a backend can run, as far as is known; of an installed one the steps may say otherwise."""
    return f"backend  {engine.name}: {engine.missing or 'installed'}"


def render_row(row: BackendRow) -> Iterator[str]:
    """What a backend can do, a field a line, each with its source in brackets."""
    yield f"backend  {row.name}: {row.missing or 'installed'}"
    for fact in list_facts(row.capabilities):
        yield f"{INDENT}{fact.title:<22} {fact.text} [{fact.source}]"


def render_broken(broken: BrokenEntryPoint) -> str:
    """An entry point that gives no backend, in the place of its row."""
    return f"backend  {broken.name}: broken: {broken.reason}"


def render_finding(finding: Finding) -> str:
    """What is wrong, or only worth a note."""
    return f"{'wrong' if finding.misconfigured else 'note':<9}{finding.text}"


def render_step(step: Step) -> str:
    """How a step went."""
    if step.state == "skipped":
        return f"step     {step.name}: skipped ({step.detail})"
    took = "" if step.duration_s is None else f" {_show_duration(step.duration_s)}"
    if step.state == "failed":
        return f"step     {step.name}: failed after{took} ({step.detail})"
    learned = "".join(f", {VERSIONS[name].format(version)}" for name, version in step.versions.items())
    return f"step     {step.name}: ok,{took}{learned} ({step.detail})"


def render_trial(trial: Trial) -> str:
    """How all steps on one device went, in one line."""
    failed = trial.first_failure
    if trial.untried is not None:
        how = f"not tried, {trial.untried}"
    elif failed is not None:
        how = render_step(failed).removeprefix("step").strip()
    else:
        last = [step.name for step in trial.steps if step.state == "ok"][-1]
        how = f"ok up to {last}, {_show_duration(trial.duration_s)}"
    return f"steps    on {trial.where}: {how}"


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


def _render_visible(allotment: VisibleGpus) -> str:
    value = "is not set" if allotment.value is None else f"is {allotment.value!r}"
    reason = f" ({allotment.reason})" if allotment.reason else ""
    return f"{allotment.variable} {value}: {', '.join(allotment.devices) or 'no GPU'}{reason}"


def _render_leases(leases: Leases) -> Iterator[str]:
    if leases.directory is None:
        return
    yield f"leases   {leases.directory}: {len(leases.holders) or 'none'}"
    yield from (f"{INDENT}{holder}" for holder in leases.holders)


def _render_meter(meter: MeterFacts) -> str:
    if meter.target is None:
        return f"{meter.name}: {meter.detail}"
    return f"{meter.name} for {meter.target}: {meter.detail if meter.available else f'no ({meter.detail})'}"
