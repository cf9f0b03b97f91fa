# SPDX-License-Identifier: Apache-2.0
"""Render a report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llenergy.record.base import Primitive

from .results import Machine, Part, Report, Table

SIGNS = {True: "ok", False: "**FAILED**", None: "not tried"}


def summary(report: Report) -> str:
    """Return the whole report: machine, status of the parts, then each part's checks, findings and tables."""
    return "\n".join([*_head(report), *(line for part in report.parts for line in _part(part))]) + "\n"


def _head(report: Report) -> Iterator[str]:
    gpu = report.machine.gpu
    board = gpu.name if gpu else "no GPU"
    driver = f", driver {gpu.driver}" if gpu and gpu.driver else ""
    yield f"# Validation: {board}{driver}, {report.started_at[:10]}"
    yield ""
    if report.dry:
        yield "**Dry run: the parts ran without a GPU. It validates no hardware.**"
        yield ""
    if report.finished_at is None:
        yield "**Not finished.**"
        yield ""
    yield from _machine(report.machine)
    yield ""
    yield f"Started {report.started_at}, {report.duration_s:.0f} s."
    yield ""
    yield "| part | status | checks | s | reason |"
    yield "| --- | --- | ---: | ---: | --- |"
    for part in report.parts:
        fine = sum(check.ok is True for check in part.checks)
        tried = sum(check.ok is not None for check in part.checks)
        cells = (part.name, part.status, f"{fine} of {tried}", f"{part.duration_s:.0f}", _cell(part.reason))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _machine(machine: Machine) -> Iterator[str]:
    gpu, host = machine.gpu, machine.environment.host
    facts: list[tuple[str, str | None]] = []
    if gpu is not None:
        limit = None if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
        memory = None if gpu.memory_bytes is None else f"{gpu.memory_bytes / 2**30:.1f} GiB"
        facts += [
            ("board", f"{gpu.name} ({gpu.uuid})"),
            ("driver", gpu.driver),
            ("CUDA version of the driver", gpu.driver_cuda),
            ("VBIOS", gpu.vbios),
            ("compute capability", gpu.compute_capability),
            ("memory", memory),
            ("power limit", limit),
            ("MIG", "on" if gpu.mig_enabled else "off"),
            ("persistence", None if gpu.persistence is None else "on" if gpu.persistence else "off"),
            ("clocks, MHz", ", ".join(f"{name} {value}" for name, value in gpu.clocks_mhz.items())),
            ("readable energies and powers", ", ".join(gpu.sources)),
            (
                "not available",
                ", ".join(f"{name} ({error})" for name, error in gpu.refused.items()) or "none",
            ),
        ]
    else:
        facts.append(("board", f"none: {machine.gpu_missing}"))
    facts += [
        ("CUDA in torch", machine.cuda and f"none: {machine.cuda}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        (
            "host",
            f"{host.cpu_model}, {host.logical_cpus} CPUs, {host.memory_bytes / 2**30:.0f} GiB, {host.system}",
        ),
        ("packages", ", ".join(f"{name} {each}" for name, each in machine.environment.packages.items())),
        ("commit", f"{machine.source.commit}{' with changes' if machine.source.dirty else ''}"),
    ]
    yield "| | |"
    yield "| --- | --- |"
    yield from (f"| {name} | {_cell(fact)} |" for name, fact in facts if fact)


def _part(part: Part) -> Iterator[str]:
    yield f"## {part.name}: {part.status}"
    yield ""
    if part.reason:
        yield f"{_cell(part.reason)}"
        yield ""
    yield from (f"- {_cell(finding)}" for finding in part.findings)
    yield ""
    yield from (
        f"- {SIGNS[check.ok]}: {_cell(check.name)}" + (f" — {_cell(check.detail)}" if check.detail else "")
        for check in part.checks
    )
    yield ""
    for table in part.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    yield f"| {' | '.join(table.columns)} |"
    yield f"|{' --- |' * len(table.columns)}"
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table.rows)
    yield ""
    if table.note:
        yield table.note
        yield ""


def _cell(value: Primitive) -> str:
    """Render a cell on one line; None becomes empty."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
