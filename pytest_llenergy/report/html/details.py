# SPDX-License-Identifier: Apache-2.0
"""Tables of one test: the numbers behind its plots, its settings, windows and flags."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from pytest_llenergy.compare.comparability import describe_settings
from pytest_llenergy.record.quantity import format_quantity, scale_of
from pytest_llenergy.record.record import Coordinates, Record
from pytest_llenergy.record.text import one_line, shorten
from pytest_llenergy.report.hosts import describe_devices, list_hosts, place_of, sum_by_host
from pytest_llenergy.report.html.cases import (
    PER_ITERATION,
    PER_TOKEN,
    OrderedRound,
    TestSection,
    format_metric_of,
)
from pytest_llenergy.report.html.parts import Cell, Row, Table, table
from pytest_llenergy.report.html.round_charts import PowerCurve
from pytest_llenergy.report.html.svg import MAX_LABEL_LENGTH
from pytest_llenergy.report.html.tables import format_share
from pytest_llenergy.report.verdicts import format_value

#: Most characters of a setting, since a parameter may be a whole prompt.
MAX_SETTING_LENGTH = 300


def metrics(case: TestSection) -> Table:
    """List the metrics of a test that have a value, side by side."""
    records = list(case.records.values())
    names = dict.fromkeys(
        name for record in records for name in record.metrics if record.value_of(name) is not None
    )
    rows: list[Row] = [[name, *(format_metric_of(record, name) for record in records)] for name in names]
    sides = [f"#{side}" for side in case.records] if len(records) > 1 else ["#value ± u"]
    return table("Metrics", ("metric", *sides), rows)


def missing_metrics(case: TestSection) -> Table:
    """List the metrics of a test that have no value on any side, by the reason."""
    records = list(case.records.values())
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        if all(record.value_of(name) is None for record in records):
            reasons = [
                record.metrics[name].reason or "no reason" for record in records if name in record.metrics
            ]
            names.setdefault("; ".join(dict.fromkeys(reasons)), []).append(name)
    rows: list[Row] = [
        [Cell(", ".join(each), "text"), Cell(reason, "text")] for reason, each in names.items()
    ]
    return table("Metrics without a value", ("metrics", "reason"), rows)


def rounds(case: TestSection, ordered: Sequence[OrderedRound]) -> Table:
    """List the rounds in order; start times count from the first round of each side."""
    first_start_s: dict[str, float] = {}
    for turn in ordered:
        first_start_s[turn.side] = min(turn.round.start_s, first_start_s.get(turn.side, turn.round.start_s))
    energies = [
        each.round.energy_j / each.round.iterations for each in ordered if each.round.energy_j is not None
    ]
    power, prefix = scale_of("J", *energies)
    per_tokens = [each.value(PER_TOKEN) for each in ordered]
    token_power, token_prefix = scale_of("J", *(each.value for each in per_tokens if each is not None))
    rows: list[Row] = []
    for turn, per_token in zip(ordered, per_tokens, strict=True):
        round_, value = turn.round, turn.value(case.metric)
        rows.append(
            [
                str(turn.place),
                f"{turn.side} {turn.number}" if len(case.records) > 1 else "",
                f"{round_.start_s - first_start_s[turn.side]:.3f}",
                format_value(round_.duration_s / round_.iterations),
                format_value(
                    round_.energy_j / round_.iterations / 10.0**power if round_.energy_j is not None else None
                ),
                f"± {format_value(round_.energy_u_j / round_.iterations / 10.0**power)}"
                if round_.energy_u_j is not None
                else "-",
                format_value(
                    round_.energy_j / round_.duration_s
                    if round_.energy_j is not None and round_.duration_s
                    else None
                ),
                format_value(per_token.value / 10.0**token_power if per_token is not None else None),
                f"{format_value(value.value)} ± {format_value(value.meter)}"
                if value is not None and case.metric not in (PER_ITERATION, PER_TOKEN)
                else "-",
                format_value(
                    round_.tokens.output / round_.duration_s
                    if round_.tokens is not None and round_.duration_s
                    else None
                ),
                format_value(round_.temperature_start_c),
                str(round_.iterations),
                Cell("invalid" if not turn.valid else "", "state invalid" if not turn.valid else ""),
                Cell("; ".join(flag.name for flag in round_.flags), "text"),
            ]
        )
    columns = (
        "#",
        "side",
        "#start s",
        "#s",
        f"#{prefix}J",
        f"#± {prefix}J",
        "#W",
        f"#{token_prefix}J/token",
        f"#{case.metric}",
        "#tokens/s",
        "#°C",
    )
    return table("Rounds", (*columns, "#iterations", "", "flags"), rows)


def hosts(case: TestSection, ordered: Sequence[OrderedRound]) -> Table:
    """List the energy of each host of a cluster in each round."""
    names = {side: list_hosts(record) for side, record in case.records.items()}
    rows: list[Row] = [
        [
            str(turn.place),
            f"{turn.side} {turn.number}" if len(case.records) > 1 else "",
            host,
            format_quantity(energy.energy_j, energy.energy_u_absolute_j, "J")
            if energy.energy_j is not None
            else "-",
            Cell(energy.reason or "", "text"),
        ]
        for turn in ordered
        for host, energy in sum_by_host(names[turn.side], turn.round).items()
    ]
    return table("Hosts", ("#", "side", "host", "#energy ± u", "reason"), rows)


def phases(case: TestSection, ordered: Sequence[OrderedRound]) -> Table:
    """List duration and energy of each phase of each round."""
    rows: list[Row] = [
        [
            str(turn.place),
            f"{turn.side} {turn.number}" if len(case.records) > 1 else "",
            phase.name,
            format_value(phase.duration_s),
            format_quantity(phase.energy_j, phase.energy_u_j, "J") if phase.energy_j is not None else "-",
            Cell(phase.reason or "", "text"),
        ]
        for turn in ordered
        for phase in turn.round.phases
    ]
    return table("Phases", ("#", "side", "phase", "#s", "#energy ± u", "reason"), rows)


def steps(curve: PowerCurve) -> Table:
    """List the numbers of a power curve."""
    powers = [*map(format_value, curve.power_w), "end"]
    rows = [[f"{at_s:.6g}", watts] for at_s, watts in zip(curve.edges_s, powers, strict=True)]
    label = f"Power, {curve.side}, {curve.label} ({curve.kind})"
    return table(label, ("#from s", "#W"), rows)


def spans(case: TestSection) -> Table:
    """List the start and end of each plotted round and of its phases."""
    rows: list[Row] = []
    for side, record in case.records.items():
        trace = record.power_trace
        if trace is not None:
            name = side if len(case.records) > 1 else ""
            rows.append([name, "round", "0", f"{trace.duration_s:.6g}"])
            rows += [[name, span.name, f"{span.start_s:.6g}", f"{span.end_s:.6g}"] for span in trace.spans]
    return table("Edges and phases", ("side", "span", "#from s", "#to s"), rows)


def flags(case: TestSection) -> Table:
    """List the flags of a test."""
    rows: list[Row] = [
        [
            side if len(case.records) > 1 else "",
            Cell(flag.severity, f"severity {flag.severity}"),
            flag.name,
            Cell(flag.detail, "text"),
        ]
        for side, record in case.records.items()
        for flag in [*record.flags, *(each for window in record.windows for each in window.flags)]
    ]
    return table("Flags", ("side", "", "flag", "detail"), rows)


def windows(case: TestSection) -> Table:
    """List the named windows of the ``energy_meter`` fixture."""
    rows: list[Row] = [
        [
            side if len(case.records) > 1 else "",
            window.name,
            format_value(window.duration_s),
            format_quantity(window.energy_j, window.energy_u_absolute_j, "J")
            if window.energy_j is not None
            else "-",
            format_value(window.energy_j / window.duration_s, "W")
            if window.energy_j is not None and window.duration_s
            else "-",
            Cell(window.reason or "", "text"),
        ]
        for side, record in case.records.items()
        for window in record.windows
    ]
    return table("Windows", ("side", "window", "#s", "#energy ± u", "#power", "reason"), rows)


def settings(case: TestSection) -> Table:
    """List how a test was run and measured, and mark settings that differ between its sides."""
    facts = [(side, dict(_settings(record))) for side, record in case.records.items()]
    names = dict.fromkeys(name for _, each in facts for name in each)
    rows: list[Row] = []
    for name in names:
        values = [each.get(name, "-") for _, each in facts]
        differs = "differs" if len(set(values)) > 1 else ""
        texts = (shorten(one_line(each), MAX_SETTING_LENGTH) for each in values)
        rows.append(
            [shorten(one_line(name), MAX_LABEL_LENGTH), *(Cell(each, f"text {differs}") for each in texts)]
        )
    sides = [side for side, _ in facts] if len(facts) > 1 else ["value"]
    return table("How it was measured", ("", *sides), rows)


def _places(record: Record) -> list[tuple[str, str]]:
    """Describe the part of the work of each process, if the model or the inputs are divided."""
    degrees = [name for name in Coordinates.__struct_fields__ if getattr(record.parallel, name) > 1]
    places = []
    for rank in record.ranks:
        parts = [(f"rank {rank.rank}", rank.coordinates)]
        parts += [
            (f"rank {rank.rank}, pid {pid}", part)
            for pid, part in zip(rank.workers, rank.worker_coordinates, strict=False)
        ]
        for name, part in parts if degrees else ():
            if part is not None:
                numbers = ", ".join(f"{degree} {getattr(part, degree)}" for degree in degrees)
                places.append((name, f"{numbers} on {place_of(rank)}"))
    return places


def _settings(record: Record) -> list[tuple[str, str]]:
    facts = [(f"parameter {name}", str(each)) for name, each in record.params.items()]
    facts += [
        (f"extra info {name}", each if isinstance(each, str) else json.dumps(each, ensure_ascii=False))
        for name, each in record.extra_info.items()
    ]
    backend = record.backend
    if backend is not None:
        facts += [
            ("backend", f"{backend.name} {backend.version}"),
            ("model", backend.model),
            ("revision", backend.model_revision or "-"),
            ("dtype", backend.dtype or "-"),
        ]
        if backend.precision is not None:
            facts += [
                (f"precision of {name.replace('_', ' ')}", value or "-")
                for name, value in msgspec.structs.asdict(backend.precision).items()
            ]
        facts += [(f"option {name}", str(each)) for name, each in backend.options.items()]
        facts += [(f"generation {name}", str(each)) for name, each in backend.generation.items()]
    facts.append(("devices", describe_devices(record)))
    settings = dict.fromkeys(map(describe_settings, record.gpu_settings))
    facts += [("settings of the boards", each) for each in settings]
    if record.fallback is not None:
        facts.append(("fallback", record.fallback))
    if record.ranks:
        facts.append(("ranks", str(len(record.ranks))))
        facts += _places(record)
    procedure = record.procedure
    if procedure is not None:
        settled = {True: "settled", False: "not settled", None: "length given"}[procedure.settled]
        facts += [
            ("warm-up", f"{procedure.warmup_iterations} iterations, {settled} ({procedure.criterion})"),
            ("iterations per round", str(procedure.iterations)),
            ("quiet gap", f"{procedure.gap_s:.3g} s"),
            ("target", f"{procedure.target:.1%}, reached {format_share(procedure.reached)}"),
            ("measuring time", f"{procedure.measuring_s:.3g} s"),
        ]
    return [*facts, ("meters", ", ".join(dict.fromkeys(meter.name for meter in record.meters)) or "none")]
