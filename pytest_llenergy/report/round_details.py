# SPDX-License-Identifier: Apache-2.0
"""Render the rounds of a test for ``-v`` and, for ``-vv``, their uncertainty and flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from pytest_llenergy.record.quantity import format_energy, format_scaled, scale_of
from pytest_llenergy.record.record import Flag, Record, Round, Terms
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.columns import UNKNOWN, number_types
from pytest_llenergy.report.hosts import list_hosts, sum_by_host
from pytest_llenergy.report.notes import SEVERITY_STYLES
from pytest_llenergy.report.text_tables import TableColumn, plain_text, split_into_tables

#: Parts of a round's uncertainty, by cause.
UNCERTAINTY_TERMS = ("edges_j", "outside_j", "resolution_j", "coverage_j", "clock_j")

#: For more hosts there are no columns.
MOST_HOSTS = 8


def round_details(
    record: Record, name: str, width: int, said: set[tuple[str, str]], *, with_terms: bool
) -> Iterator[Table | Text]:
    """Yield the rounds of a test for ``-v``; ``with_terms`` adds uncertainty and flags for ``-vv``.

    Args:
        record: The record of the test.
        name: Name of the test.
        width: Width of the terminal in characters.
        said: Names and details of the flags of tests so far, which are not repeated.
        with_terms: Whether to add uncertainty and flags.
    """
    if not record.rounds:
        return
    types = number_types(record)
    more = f"; number types {types}" if types not in ("-", UNKNOWN) else ""
    yield plain_text(f"{name}: {_procedure(record)}{more}", style="bold")
    numbers = TableColumn("round", [str(number) for number in range(1, len(record.rounds) + 1)])
    yield from split_into_tables(numbers, _round_columns(record), width)
    if with_terms:
        yield from split_into_tables(
            numbers, [_term_column(term, record.rounds) for term in _terms(record.rounds)], width
        )
        yield from _uncertainty(record)
        yield from _flags(record, said)


def _round_columns(record: Record) -> list[TableColumn]:
    """Return the columns for which at least one round has a value, and one for each host."""
    rounds = record.rounds
    columns = [
        TableColumn("s", [f"{each.duration_s:.3g}" for each in rounds]),
        _energy_column(record),
        TableColumn("idle W", [_number(each.idle_power_w) for each in rounds]),
        TableColumn("token", [str(each.tokens.output) if each.tokens else "-" for each in rounds]),
        TableColumn("°C", [_number(each.temperature_start_c) for each in rounds]),
        TableColumn("other CPU s", [_number(each.other_cpu_s) for each in rounds]),
        TableColumn("flags", [_flag_names(each) for each in rounds], False),
    ]
    columns[2:2] = _host_columns(record)
    return [column for column in columns if set(column.cells) != {"-"}]


def _flag_names(round_: Round) -> str:
    """Return the names of the flags, each once: several hosts or boards may raise the same."""
    return ",".join(dict.fromkeys(flag.name for flag in round_.flags)) or "-"


def _energy_column(record: Record) -> TableColumn:
    # Columns of several hosts beside it are of different devices.
    absolute = len(list_hosts(record)) > 1
    energies = [
        (each.energy_j, each.energy_u_absolute_j if absolute else each.energy_u_j) for each in record.rounds
    ]
    return _joules("energy ± u", energies)


def _host_columns(record: Record) -> Iterator[TableColumn]:
    """Yield the joules of each host, if there are several. Those of many are in the HTML report only."""
    names = list_hosts(record)
    found = [sum_by_host(names, each) for each in record.rounds]
    for name in names if 1 < len(names) <= MOST_HOSTS else ():
        energies = [(each[name].energy_j, each[name].energy_u_absolute_j) for each in found]
        yield _joules(f"{name} ± u", energies)


def _joules(title: str, energies: Sequence[tuple[float | None, float | None]]) -> TableColumn:
    """Return a column of joules with their uncertainties, all in the step of the largest."""
    scale = scale_of("J", *(energy_j for energy_j, _ in energies if energy_j is not None))
    cells = [
        "-" if energy_j is None else format_scaled(energy_j, u_j, "J", scale) for energy_j, u_j in energies
    ]
    return TableColumn(title, cells)


def _terms(rounds: Sequence[Round]) -> list[str]:
    """Return the terms to show. Clocks add nothing where one host was measured."""
    hosts_differ = any(each.terms is not None and each.terms.clock_j for each in rounds)
    return [name for name in UNCERTAINTY_TERMS if name != "clock_j" or hosts_differ]


def _term_column(name: str, rounds: Sequence[Round]) -> TableColumn:
    terms = [each.terms for each in rounds]
    return TableColumn(name.removesuffix("_j"), [_term(each, name) for each in terms])


def _term(terms: Terms | None, name: str) -> str:
    return "-" if terms is None else format_energy(getattr(terms, name))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _procedure(record: Record) -> str:
    """Return ``6 rounds of 2 iterations after a warm-up of 3 (settled)``."""
    rounds = _count(len(record.rounds), "round")
    procedure = record.procedure
    if procedure is None:
        return rounds
    settled = {True: " (settled)", False: " (not settled)", None: ""}[procedure.settled]
    each = _count(procedure.iterations, "iteration")
    return f"{rounds} of {each} after a warm-up of {procedure.warmup_iterations}{settled}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _uncertainty(record: Record) -> Iterator[Text]:
    """Yield a line with the causes of the uncertainty of the energy."""
    metric = record.metrics.get("energy_j")
    if metric is None or metric.value is None or metric.uncertainty is None:
        return
    parts = [f"{format_energy(metric.uncertainty)} between runs on these devices"]
    if metric.spread is not None:
        parts.append(
            f"of which {format_energy(metric.spread)} from the scatter of {_count(metric.n, 'round')}"
        )
    if metric.uncertainty_absolute is not None:
        parts.append(f"{format_energy(metric.uncertainty_absolute)} with the accuracy of the source")
    if record.procedure is not None and record.procedure.reached is not None:
        parts.append(f"reached {record.procedure.reached:.1%}, target {record.procedure.target * 100:g}%")
    yield plain_text(f"u of an iteration: {', '.join(parts)}")


def _flags(record: Record, said: set[tuple[str, str]]) -> Iterator[Text]:
    rounds: dict[Flag, list[int]] = {}
    for number, round_ in enumerate(record.rounds, 1):
        for flag in round_.flags:
            rounds.setdefault(flag, []).append(number)
    # Flags of rounds are also summarised in the record, and estimates are a note below.
    for flag in record.flags:
        shown = any(flag.name == each.name and flag.detail.endswith(each.detail) for each in rounds)
        if not shown and flag.name != "estimated" and (flag.name, flag.detail) not in said:
            said.add((flag.name, flag.detail))
            yield _line(flag, flag.name)
    for flag, numbers in rounds.items():
        plural = "s" if len(numbers) > 1 else ""
        yield _line(flag, f"round{plural} {', '.join(map(str, numbers))}: {flag.name}")


def _line(flag: Flag, where: str) -> Text:
    return plain_text(
        one_line(f"{where} ({flag.severity}): {flag.detail}"), style=SEVERITY_STYLES.get(flag.severity, "")
    )
