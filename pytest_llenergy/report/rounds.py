# SPDX-License-Identifier: Apache-2.0
"""One test in detail: its rounds, and with more verbosity what is not known of them and every flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from pytest_llenergy.model.record import Flag, Record, Round, Terms
from pytest_llenergy.model.text import one_line
from pytest_llenergy.report.columns import rounded
from pytest_llenergy.report.grid import Strip, grids

#: How a line on a flag looks.
STYLES = {"warning": "yellow", "invalid": "red"}

#: What is not known of an energy, by cause.
TERMS = ("edges_j", "outside_j", "resolution_j", "coverage_j")


def details(record: Record, name: str, width: int, *, with_terms: bool) -> Iterator[Table | Text]:
    """What ``-v`` shows of a test, and ``-vv`` if ``with_terms``; nothing of one without rounds."""
    if not record.rounds:
        return
    yield Text(f"{name}: {_procedure(record)}", style="bold")
    numbers = Strip("round", [str(number) for number in range(1, len(record.rounds) + 1)])
    yield from grids(numbers, _strips(record.rounds), width)
    if with_terms:
        yield from grids(numbers, [_terms(term, record.rounds) for term in TERMS], width)
        yield from _uncertainty(record)
        yield from _flags(record)


def _strips(rounds: Sequence[Round]) -> list[Strip]:
    """Columns without those that no round has anything in."""
    strips = [
        Strip("s", [f"{each.duration_s:.3g}" for each in rounds]),
        Strip("J ± u", [_joules(each) for each in rounds]),
        Strip("idle W", [_number(each.idle_power_w) for each in rounds]),
        Strip("token", [str(each.tokens.output) if each.tokens else "-" for each in rounds]),
        Strip("°C", [_number(each.temperature_start_c) for each in rounds]),
        Strip("other CPU s", [_number(each.other_cpu_s) for each in rounds]),
        Strip("flags", [",".join(flag.name for flag in each.flags) or "-" for each in rounds], False),
    ]
    return [strip for strip in strips if set(strip.cells) != {"-"}]


def _terms(name: str, rounds: Sequence[Round]) -> Strip:
    terms = [each.terms for each in rounds]
    return Strip(f"{name.removesuffix('_j')} J", [_term(each, name) for each in terms])


def _term(terms: Terms | None, name: str) -> str:
    return "-" if terms is None else f"{getattr(terms, name):.2g}"


def _joules(round_: Round) -> str:
    return "-" if round_.energy_j is None else rounded(round_.energy_j, round_.energy_u_absolute_j)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _procedure(record: Record) -> str:
    """``6 rounds of 2 iterations after a warm-up of 3 (settled)``."""
    rounds = _count(len(record.rounds), "round")
    done = record.procedure
    if done is None:
        return rounds
    settled = {True: " (settled)", False: " (not settled)", None: ""}[done.settled]
    each = _count(done.iterations, "iteration")
    return f"{rounds} of {each} after a warm-up of {done.warmup_iterations}{settled}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _uncertainty(record: Record) -> Iterator[Text]:
    """Where that of the mean comes from."""
    metric = record.metrics.get("energy_j")
    if metric is None or metric.value is None or metric.uncertainty is None:
        return
    told = [f"{metric.uncertainty:.2g} J between runs on these devices"]
    if metric.spread is not None:
        told.append(f"{metric.spread:.2g} J of it from the scatter of {_count(metric.n, 'round')}")
    if metric.uncertainty_absolute is not None:
        told.append(f"{metric.uncertainty_absolute:.2g} J with the accuracy of the source")
    if record.procedure is not None and record.procedure.reached is not None:
        told.append(f"reached {record.procedure.reached:.1%}, target {record.procedure.target:.1%}")
    yield Text(f"u of an iteration: {', '.join(told)}")


def _flags(record: Record) -> Iterator[Text]:
    """Those of the test, then those of each round."""
    for flag in record.flags:
        yield _line(flag, flag.name)
    for number, round_ in enumerate(record.rounds, 1):
        for flag in round_.flags:
            yield _line(flag, f"round {number}: {flag.name}")


def _line(flag: Flag, where: str) -> Text:
    return Text(one_line(f"{where} ({flag.severity}): {flag.detail}"), style=STYLES.get(flag.severity, ""))
