# SPDX-License-Identifier: Apache-2.0
"""Tables about all tests of the HTML report, and about its rules, meters and machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llenergy.compare.limits import relative_spread
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.custom_metrics import custom_metrics_of
from pytest_llenergy.record.environment import Board, Environment, describe_unlike
from pytest_llenergy.record.metrics import is_prefill_only, round_values
from pytest_llenergy.record.quantity import format_quantity, shown_unit
from pytest_llenergy.record.record import MeterInfo, Record, Round
from pytest_llenergy.record.secrets import redact_arguments
from pytest_llenergy.record.text import short_test_name
from pytest_llenergy.report.columns import COLUMNS, column_of
from pytest_llenergy.report.html.cases import LabelledReport, TestSection, order_rounds
from pytest_llenergy.report.html.header import describe_machine
from pytest_llenergy.report.html.parts import Cell, Row, Table, table
from pytest_llenergy.report.layout import DEFAULT_LAYOUT, has_values
from pytest_llenergy.report.verdicts import (
    format_change,
    format_interval,
    format_rounds,
    format_sides,
    format_size,
    format_value,
)

#: Columns of the table of all tests.
MEASURED_COLUMNS = (
    "energy_j",
    "energy_per_output_token_j",
    "energy_per_input_token_j",
    "output_tokens_per_s",
    "mean_power_w",
    "duration_s",
    "rounds",
)

#: Columns of work with output tokens, and the one of work that only reads its input.
OF_OUTPUT, OF_INPUT = ("energy_per_output_token_j", "output_tokens_per_s"), ("energy_per_input_token_j",)


def state_cell(state: str) -> Cell:
    """Return a cell with a verdict or a status in its colour."""
    return Cell(state, f"state {state.replace(' ', '-')}")


def format_round_spread(rounds: Sequence[Round]) -> str:
    """Format the relative scatter of the energy of single valid rounds, as the noise of a comparison."""
    logs = [math.log(each.value) for each in round_values("energy_j", rounds)[0] if each.value > 0]
    return f"{relative_spread(logs):.1%}" if len(logs) > 1 else "-"


def format_share(number: float | None) -> str:
    return "-" if number is None else f"{number:.1%}"


def verdicts(cases: Sequence[TestSection], shown: int) -> Table:
    """List every comparison. Tests after the first ``shown`` have no section to link to."""
    metrics = {each.metric for case in cases for each in case.comparisons}
    rows: list[Row] = [
        [
            state_cell(each.verdict),
            Cell(short_test_name(each.id), "name", case.anchor if place < shown else ""),
            each.metric if len(metrics) > 1 else "",
            *_pair(each),
            format_change(each),
            format_interval(each),
            format_share(each.noise),
            "-" if each.detectable is None else format_size(each.detectable),
            format_rounds(each),
            f"{format_value(each.base_tokens_per_s)} → {format_value(each.head_tokens_per_s)}"
            if each.base_tokens_per_s is not None and each.head_tokens_per_s is not None
            else "-",
        ]
        for place, case in enumerate(cases)
        for each in case.comparisons
    ]
    columns = (
        "verdict",
        "test",
        "metric",
        "#base",
        "#head",
        "#change",
        "#limits",
        "#noise",
        "#detectable",
        "#rounds",
    )
    named = "" if len(metrics) > 1 else f", {''.join(metrics)}"
    label = f"Verdicts{named}; head is base times the estimated change"
    return table(label, (*columns, "#tokens/s"), rows)


def _pair(comparison: Comparison) -> tuple[str, str]:
    base, head = format_sides(comparison)
    return base, head + comparison.kind_label


def measured(cases: Sequence[TestSection], shown: int) -> Table:
    """List every test of one report that has a value, and its windows, in columns of the terminal."""
    records = [case.records["head"] for case in cases]
    names = [*MEASURED_COLUMNS, *custom_metrics_of(records)]
    differing = DEFAULT_LAYOUT.columns_of(records)
    names[:0] = [name for name in ("device", "types") if COLUMNS[name] in differing]
    mixed = len({record.kind for record in records} - {None}) > 1
    rows: list[Row] = []
    for place, (case, record) in enumerate(zip(cases, records, strict=True)):
        name, target = short_test_name(case.id), case.anchor if place < shown else ""
        state = state_cell(record.status) if record.status != "measured" else ""
        kind = (record.kind or "-") if mixed else ""
        if has_values(record) and (record.counts or record.value_of("energy_j") is not None):
            cells = [_cell(each, record) for each in names]
            noise = format_round_spread(record.rounds)
            rows.append([Cell(name, "name", target), state, *cells, noise, kind])
        for window in record.windows:
            if window.energy_j is not None:
                values = {
                    "energy_j": format_quantity(window.energy_j, window.energy_u_absolute_j, "J"),
                    "duration_s": f"{window.duration_s:.3g}",
                    "mean_power_w": f"{window.energy_j / window.duration_s:.3g}"
                    if window.duration_s
                    else "-",
                }
                cells = [values.get(each, "-") for each in names]
                rows.append([Cell(f"{name} · {window.name}", "name", target), state, *cells, "-", kind])
    columns = [column_of(each) for each in names]
    heads = [f"#{each.head}" if each.is_number else each.head for each in columns]
    # Wide tables scroll, and a failure must be seen before.
    return table("Tests", ("test", "status", *heads, "#noise", "kind"), rows)


def _cell(name: str, record: Record) -> str:
    """Return a cell; the energy per output token of a prefill would be that of its prompt."""
    if name in (OF_OUTPUT if is_prefill_only(record.rounds) else OF_INPUT):
        return "-"
    return column_of(name, absolute=True).cell(record)


def invalid_rounds(cases: Sequence[TestSection], *, interleaved: bool) -> Table:
    """List the invalid rounds with the reasons."""
    rows: list[Row] = []
    for case in cases:
        for turn in order_rounds(case, interleaved=interleaved):
            flags = [flag for flag in turn.round.flags if flag.severity == "invalid"]
            reasons = [f"{flag.name}: {flag.detail}" for flag in flags]
            if turn.round.energy_j is None:
                reasons.append(turn.round.reason or "no joules")
            if reasons:
                side = turn.side if len(case.records) > 1 else ""
                rows.append(
                    [
                        Cell(short_test_name(case.id), "name"),
                        side,
                        str(turn.number),
                        Cell("; ".join(reasons), "text"),
                    ]
                )
    return table("Invalid rounds", ("test", "side", "#round", "why"), rows)


def rules(comparisons: Sequence[Comparison]) -> Table:
    """List the rules behind the verdicts."""
    applied = dict.fromkeys(
        (each.metric, each.unit, each.rule, each.better) for each in comparisons if each.rule is not None
    )
    rows: list[Row] = []
    for metric, unit, rule, better in applied:
        absolute = (
            f" and {rule.threshold_absolute:g} {shown_unit(unit)}".rstrip() if rule.threshold_absolute else ""
        )
        rows.append(
            [
                metric,
                better,
                f"{_percent(rule.threshold)}{absolute} or more",
                f"more than {_percent(rule.floor)}",
                f"less than {_percent(rule.tolerance)}",
                f"{rule.alpha:.3g}",
            ]
        )
    columns = (
        "metric",
        "better",
        "regressed: worse by",
        "regressed: nearer limit",
        "unchanged: worse limit",
        "#alpha per limit",
    )
    return table("Rule", columns, rows)


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def meters(sides: Sequence[LabelledReport]) -> Table:
    """List every meter once."""
    labels_by_meter: dict[MeterInfo, list[str]] = {}
    for side in sides:
        for record in side.report.records:
            for meter in record.meters:
                labels_by_meter.setdefault(meter, []).append(side.label)
    rows: list[Row] = [
        [
            meter.domain,
            meter.name,
            Cell(meter.kind, f"kind {meter.kind}"),
            Cell(meter.source, "text"),
            Cell(meter.scope, "text"),
            f"{meter.update_period_s * 1e3:.3g}" if meter.update_period_s is not None else "-",
            format_value(meter.resolution_j),
            Cell(meter.accuracy, "text"),
            f"{meter.coverage:.0%}",
            "yes" if meter.exclusive else "no",
            ", ".join(dict.fromkeys(labels)),
        ]
        for meter, labels in labels_by_meter.items()
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
        "#coverage",
    )
    return table("Meters", (*columns, "exclusive", "side"), rows)


def machine(sides: Sequence[LabelledReport]) -> Table:
    """List the machine and the code of each side, and mark facts that differ."""
    facts = [dict(_machine(side)) for side in sides]
    names = dict.fromkeys(name for each in facts for name in each)
    rows: list[Row] = []
    for name in names:
        values = [each.get(name, "-") for each in facts]
        differs = "differs" if len(set(values)) > 1 else ""
        rows.append([name, *(Cell(each, f"text {differs}") for each in values)])
    columns = [side.label for side in sides] if len(sides) > 1 else ["value"]
    return table("Machine", ("", *columns), rows)


def _machine(side: LabelledReport) -> list[tuple[str, str]]:
    report = side.report
    source, run = report.source, report.run
    facts = [
        ("commit", f"{source.commit or '-'}{' (with changes)' if source.dirty else ''}"),
        ("branch", source.branch or "-"),
        ("run", run.id),
        ("started", run.started_at),
        ("finished", run.finished_at or "-"),
        ("complete", "yes" if run.complete else "no: its remaining tests are missing"),
        ("command", " ".join(redact_arguments(run.argv))),
        ("tool", f"{report.tool.name} {report.tool.version}, schema {report.schema_version}"),
    ]
    if run.slurm is not None:
        facts.append(("Slurm job", f"{run.slurm.id} on {run.slurm.nodes}"))
    environment = report.environment
    if environment is None:
        return facts
    host = environment.host
    facts += [
        ("host", host.name),
        ("system", f"{host.system}, {host.machine}"),
        ("CPU", f"{host.cpu_model}, {host.logical_cpus} usable"),
        ("memory", _gib(host.memory_bytes)),
        ("GPUs", "; ".join(_board(board) for board in environment.gpus) or "none"),
        ("GPUs missing", "; ".join(environment.gpus_missing) or "-"),
        ("driver", environment.driver or "-"),
        ("Python", environment.python),
    ]
    facts += [(name, version) for name, version in environment.packages.items()]
    return [*facts, ("device key", environment.key), *_hosts_of_cluster(environment)]


def _hosts_of_cluster(environment: Environment) -> list[tuple[str, str]]:
    """Describe the hosts on which tests were measured, if they are not that of pytest."""
    hosts = environment.cluster_hosts
    if not hosts:
        return []
    facts = {
        "memory of hosts": (_gib(each.host.memory_bytes) for each in hosts.values()),
        "system of hosts": (f"{each.host.system}, {each.host.machine}" for each in hosts.values()),
        "driver of hosts": (each.driver or "-" for each in hosts.values()),
        "Python of hosts": (each.python for each in hosts.values()),
    }
    return [
        ("measured hosts", ", ".join(hosts)),
        ("hardware of hosts", describe_machine(environment)),
        *((name, ", ".join(dict.fromkeys(values))) for name, values in facts.items()),
        ("differences of hosts", describe_unlike(hosts) or "none"),
    ]


def _board(board: Board) -> str:
    parts = [board.name, board.uuid]
    parts += [_gib(board.memory_bytes)] if board.memory_bytes is not None else []
    parts += [f"{board.power_limit_w:g} W"] if board.power_limit_w is not None else []
    return ", ".join(parts)


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
