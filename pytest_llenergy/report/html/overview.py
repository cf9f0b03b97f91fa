# SPDX-License-Identifier: Apache-2.0
"""All tests, a row each: the numbers of the figures at the top, and what does not count."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.report.html.cases import Case, turns
from pytest_llenergy.report.html.cells import (
    Cell,
    Row,
    Table,
    plain,
    scatter,
    share,
    state_cell,
    table,
    with_uncertainty,
)
from pytest_llenergy.report.html.exchange import figures_of
from pytest_llenergy.report.names import short
from pytest_llenergy.report.verdicts import change, interval, value


def verdicts(cases: Sequence[Case], shown: int) -> Table:
    """Every comparison. Tests beyond the first ``shown`` have no section to link to."""
    metrics = {each.metric for case in cases for each in case.comparisons}
    rows: list[Row] = [
        [
            state_cell(each.verdict),
            Cell(short(each.id), "name", case.anchor if place < shown else ""),
            each.metric if len(metrics) > 1 else "",
            value(each.base, each.unit),
            value(each.head, each.unit) + (" (estimated)" if each.kind == "estimated" else ""),
            change(each),
            interval(each),
            share(each.noise),
            share(each.detectable),
            f"{each.n_base} + {each.n_head}" if each.judged else "-",
            f"{value(each.base_tokens_per_s)} → {value(each.head_tokens_per_s)}"
            if each.base_tokens_per_s is not None and each.head_tokens_per_s is not None
            else "-",
            Cell("; ".join([each.reason, *each.notes]), "text"),
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
        "#finds",
        "#rounds",
    )
    label = "Verdicts" if len(metrics) > 1 else f"Verdicts, {''.join(metrics)}"
    return table(label, (*columns, "#tokens/s", "why"), rows)


def measured(cases: Sequence[Case], shown: int) -> Table:
    """Every test of one report."""
    rows: list[Row] = []
    for place, case in enumerate(cases):
        record = case.records["head"]
        rows.append(
            [
                state_cell(record.status),
                Cell(short(case.id), "name", case.anchor if place < shown else ""),
                *(
                    with_uncertainty(record.metrics.get(name))
                    for name in ("energy_j", "energy_per_output_token_j")
                ),
                plain(record.metrics.get("output_tokens_per_s")),
                plain(record.metrics.get("mean_power_w")),
                with_uncertainty(record.metrics.get("duration_s")),
                scatter(record.metrics.get("energy_j")),
                str(len(record.rounds)) if record.rounds else "-",
                record.kind or "-",
                Cell(record.reason or "", "text"),
            ]
        )
    columns = (
        "status",
        "test",
        "#J ± u",
        "#J/token ± u",
        "#token/s",
        "#W",
        "#s",
        "#noise",
        "#rounds",
        "kind",
    )
    return table("Tests", (*columns, "why"), rows)


def speeds(cases: Sequence[Case]) -> Table:
    """Joules per token and tokens per second of each side."""
    rows: list[Row] = []
    for case in cases:
        for side, record in case.records.items():
            found = figures_of(record)
            if found is not None:
                name = side if len(case.records) > 1 else ""
                rows.append([Cell(short(case.id), "name"), name, value(found[0]), value(found[1])])
    return table("Energy against speed", ("test", "side", "#tokens/s", "#J/token"), rows)


def invalid_rounds(cases: Sequence[Case], *, interleaved: bool) -> Table:
    """Rounds that count for nothing, and why."""
    rows: list[Row] = []
    for case in cases:
        for turn in turns(case, interleaved=interleaved):
            whys = [flag for flag in turn.round.flags if flag.severity == "invalid"]
            told = [f"{flag.name}: {flag.detail}" for flag in whys]
            if turn.round.energy_j is None:
                told.append(turn.round.reason or "no joules")
            if told:
                side = turn.side if len(case.records) > 1 else ""
                rows.append(
                    [Cell(short(case.id), "name"), side, str(turn.number), Cell("; ".join(told), "text")]
                )
    return table("Invalid rounds", ("test", "side", "#round", "why"), rows)


def rules(comparisons: Sequence[Comparison]) -> Table:
    """By what the verdicts were found."""
    found = dict.fromkeys(
        (each.metric, each.unit, each.rule, each.better) for each in comparisons if each.rule is not None
    )
    rows: list[Row] = []
    for metric, unit, rule, better in found:
        absolute = f" and {rule.threshold_absolute:g} {unit}" if rule.threshold_absolute else ""
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
        "better is",
        "worse by",
        "and surely by",
        "unchanged: surely worse by",
        "#alpha of a limit",
    )
    return table("Rule", columns, rows)


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"
