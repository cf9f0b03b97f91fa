# SPDX-License-Identifier: Apache-2.0
"""Where it was measured and by what."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.model.environment import Board
from pytest_llenergy.model.record import MeterInfo
from pytest_llenergy.report.html.cases import Side
from pytest_llenergy.report.html.cells import Cell, Row, Table, table
from pytest_llenergy.report.remote import without_secrets
from pytest_llenergy.report.verdicts import value


def meters(sides: Sequence[Side]) -> Table:
    """Everything that was read, once."""
    found: dict[MeterInfo, list[str]] = {}
    for side in sides:
        for record in side.report.records:
            for meter in record.meters:
                found.setdefault(meter, []).append(side.label)
    rows: list[Row] = [
        [
            meter.domain,
            meter.name,
            Cell(meter.kind, f"kind {meter.kind}"),
            Cell(meter.source, "text"),
            Cell(meter.scope, "text"),
            f"{meter.update_period_s * 1e3:.3g}" if meter.update_period_s is not None else "-",
            value(meter.resolution_j),
            Cell(meter.accuracy, "text"),
            f"{meter.coverage:.0%}",
            "yes" if meter.exclusive else "no",
            ", ".join(dict.fromkeys(labels)),
        ]
        for meter, labels in found.items()
    ]
    columns = (
        "domain",
        "meter",
        "kind",
        "source",
        "scope",
        "#period ms",
        "#resolution J",
        "accuracy",
        "#sees",
    )
    return table("Meters", (*columns, "exclusive", "side"), rows)


def machine(sides: Sequence[Side]) -> Table:
    """Where it ran, and of which code."""
    facts = [dict(_machine(side)) for side in sides]
    names = dict.fromkeys(name for each in facts for name in each)
    rows: list[Row] = []
    for name in names:
        values = [each.get(name, "-") for each in facts]
        differs = "differs" if len(set(values)) > 1 else ""
        rows.append([name, *(Cell(each, f"text {differs}") for each in values)])
    columns = [side.label for side in sides] if len(sides) > 1 else ["value"]
    return table("Machine", ("", *columns), rows)


def _machine(side: Side) -> list[tuple[str, str]]:
    report = side.report
    source, run = report.source, report.run
    found = [
        ("commit", f"{source.commit or '-'}{' (with changes)' if source.dirty else ''}"),
        ("branch", source.branch or "-"),
        ("run", run.id),
        ("started", run.started_at),
        ("finished", run.finished_at or "-"),
        ("complete", "yes" if run.complete else "no: what it had not measured is missing"),
        ("command", " ".join(without_secrets(run.argv))),
        ("tool", f"{report.tool.name} {report.tool.version}, schema {report.schema_version}"),
    ]
    there = report.environment
    if there is None:
        return found
    host = there.host
    found += [
        ("host", host.name),
        ("system", f"{host.system}, {host.machine}"),
        ("CPU", f"{host.cpu_model}, {host.logical_cpus} usable"),
        ("memory", _gib(host.memory_bytes)),
        ("GPUs", "; ".join(_board(board) for board in there.gpus) or "none"),
        ("GPUs missing", "; ".join(there.gpus_missing) or "-"),
        ("driver", there.driver or "-"),
        ("Python", there.python),
    ]
    found += [(name, version) for name, version in there.packages.items()]
    return [*found, ("device key", there.key)]


def _board(board: Board) -> str:
    parts = [board.name, board.uuid]
    parts += [_gib(board.memory_bytes)] if board.memory_bytes is not None else []
    parts += [f"{board.power_limit_w:g} W"] if board.power_limit_w is not None else []
    return ", ".join(parts)


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
