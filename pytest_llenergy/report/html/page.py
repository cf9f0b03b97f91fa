# SPDX-License-Identifier: Apache-2.0
"""The HTML page of one report, of two compared reports, or of a paired report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

import msgspec

import pytest_llenergy
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison, ReportSource
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, Source
from pytest_llenergy.record.text import one_line, short_test_name, shorten
from pytest_llenergy.report.columns import meter_names
from pytest_llenergy.report.html import figures, tables
from pytest_llenergy.report.html.axes import Chart
from pytest_llenergy.report.html.figures import PER_ITERATION, PER_TOKEN, writes_tokens
from pytest_llenergy.report.html.tables import Table, state_of
from pytest_llenergy.report.loads import describe_curve, describe_failure
from pytest_llenergy.report.notes import list_notes
from pytest_llenergy.report.verdicts import describe_noise, format_change, format_limits, sort_by_verdict

#: Most tests with a section; the others are in the tables only.
MAX_SECTIONS = 100

#: States in the order in which they are counted.
STATES = ("failed", "crashed", *VERDICTS, "measured", "attributed", "estimated", "skipped")


class Section(NamedTuple):
    """One test of a page: ``tables`` are shown, and ``folded`` ones on demand."""

    anchor: str
    id: str
    state: str
    summary: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()


def require_html_extra() -> None:
    """Raise ``ReportError`` if the extra ``html`` is not installed."""
    if find_spec("jinja2") is None:
        raise ReportError("HTML needs jinja2: pip install 'pytest-llenergy[html]'")


def render_template(**variables: Any) -> str:
    """Fill the template of a page: every text is escaped and put on one line."""
    require_html_extra()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pytest_llenergy.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if type(value) is not str or value.isprintable() else one_line(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(shorten=shorten, short=short_test_name)
    return environment.get_template("page.html.j2").render(version=pytest_llenergy.__version__, **variables)


def render_report(report: Report) -> str:
    """Render one report as a page: the last attempt of each test."""
    records = list({record.id: record for record in report.records}.values())
    report = msgspec.structs.replace(report, records=records)
    backends = [each.backend for each in records if each.backend is not None]
    notes = [] if report.run.complete else ["The run did not finish; its remaining tests are missing."]
    facts = [
        ("Machine", describe_machine(report.environment)),
        ("Model", ", ".join(dict.fromkeys(each.model.rpartition("/")[2] for each in backends))),
        ("Backend", ", ".join(dict.fromkeys(f"{each.name} {each.version}" for each in backends))),
        ("Meter", ", ".join(dict.fromkeys(meter_names(each) for each in records if each.meters))),
        ("Commit", describe_commit(report.source)),
        ("Started", report.run.started_at),
    ]
    if report.baseline is not None:
        facts.append(("Baseline", report.baseline.side.origin))
        absent = ", ".join(report.baseline.absent)
        notes += [f"In the baseline but not in this run: {absent}"] if absent else []
    notes += [text for _, text in list_notes(records)]
    comparisons = [each for record in records for each in record.comparisons]
    return _render("Energy report", map(state_of, records), facts, notes, {"value": report}, comparisons)


def render_compared(
    base: Report, head: Report, compared: ComparedReports, *, pairs: str | None = None
) -> str:
    """Render two reports and their comparison as a page.

    ``pairs`` are the stages of a run that measured both sides alternately, such as ``6+6``.
    """
    facts = [
        ("Head", describe_commit(compared.head) or compared.head.origin),
        ("Base", describe_commit(compared.base) or compared.base.origin),
        ("Order", f"{pairs} pairs, measured alternately" if pairs is not None else ""),
        ("Devices", "; ".join(compared.devices)),
    ]
    states = [each.verdict for each in compared.comparisons]
    sides = {"base": base, "head": head}
    return _render("Energy comparison", states, facts, compared.notes, sides, compared.comparisons)


def _render(
    title: str,
    states: Iterable[str],
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    reports: Mapping[str, Report],
    comparisons: Sequence[Comparison],
) -> str:
    """Render a page. That of one report has the figures of its tests, too."""
    numbers = Counter(states)
    counts = [(state, numbers[state]) for state in STATES if numbers[state]]
    comparisons = sort_by_verdict(comparisons)
    sides = {side: {record.id: record for record in each.records} for side, each in reports.items()}
    records = [record for side in sides.values() for record in side.values()]
    tests = dict.fromkeys([*(each.id for each in comparisons), *(record.id for record in records)])
    verdicts: dict[str, list[Comparison]] = {test: [] for test in tests}
    for each in comparisons:
        verdicts[each.id].append(each)
    anchors = {test: f"t{number}" * (number <= MAX_SECTIONS) for number, test in enumerate(verdicts, 1)}
    shown = records if len(reports) == 1 else []
    rules = dict.fromkeys((each.metric, each.rule) for each in comparisons if each.rule)
    machines = {side: tables.machine_of(each) for side, each in reports.items()}
    return render_template(
        title=f"{title}: {', '.join(f'{count} {state}' for state, count in counts) or 'nothing to show'}",
        counts=counts,
        facts=[*facts, ("Noise", describe_noise(comparisons).removeprefix("noise "))],
        notes=notes,
        charts=figures.energy_against_speed(shown),
        multiples=figures.energy_by_parameter(shown),
        row_charts=[*figures.verdict_intervals(comparisons, anchors), *figures.energy_bars(shown, anchors)],
        overview=[
            *tables.verdicts(comparisons, anchors),
            *tables.tests(shown, anchors),
            *tables.windows(shown, anchors),
            *tables.reasons(comparisons, [] if comparisons else records),
        ],
        sections=[
            _section(test, anchors[test], sides, found)
            for test, found in islice(verdicts.items(), MAX_SECTIONS)
        ],
        left_out=max(0, len(anchors) - MAX_SECTIONS),
        closing=[
            *tables.facts_table("Rule", ({"metric": metric, "": rule} for metric, rule in rules)),
            *tables.facts_table("Meters", dict.fromkeys(meter for each in records for meter in each.meters)),
            *tables.side_by_side("Machine, software and run", machines),
        ],
        footer="±: standard uncertainty (k = 1), for comparing tests of the same devices and meters. "
        "Metrics are per iteration, medians over the valid rounds.",
    )


def _section(
    test: str, anchor: str, sides: Mapping[str, Mapping[str, Record]], comparisons: Sequence[Comparison]
) -> Section:
    records = {side: found[test] for side, found in sides.items() if test in found}
    notes = [f"{each.metric}: {each.reason}" for each in comparisons]
    notes += [note for each in comparisons for note in [*each.notes, *each.differences]]
    loads: list[Table] = []
    rounds: list[Table] = []
    values: list[str] = []
    for side, record in records.items():
        name = f", {side}" if len(records) > 1 else ""
        notes += [f"{record.status}: {record.reason}"] if record.reason else []
        notes += [f"{flag.severity} {flag.name}: {flag.detail}" for flag in record.flags]
        metric = record.metrics.get(PER_TOKEN if writes_tokens(record) else PER_ITERATION)
        if metric is not None and metric.value is not None:
            values.append(format_quantity(metric.value, metric.uncertainty, metric.unit))
        if (curve := record.load_curve) is not None:
            loads += tables.loads(curve, name)
            notes += filter(None, [describe_curve(curve), describe_failure(curve)])
        rounds += tables.rounds(record, name)
    settings = {side: tables.settings_of(record) for side, record in records.items()}
    state = next(iter([each.verdict for each in comparisons] or map(state_of, records.values())), "")
    changes = [
        f"{format_change(each.ratio)} ({format_limits(each)})" for each in comparisons[:1] if each.ratio
    ]
    return Section(
        anchor,
        test,
        state,
        " ".join([" → ".join(values), *changes]),
        list(dict.fromkeys(notes)),
        (),
        [*tables.metrics(records), *loads],
        [*rounds, *tables.side_by_side("Settings", settings)],
    )


def describe_machine(environment: Environment | None) -> str:
    """Return CPU and GPUs of the measured hosts, such as ``AMD EPYC 9354 (64 CPUs), 2 × NVIDIA H100``."""
    hosts = [] if environment is None else list(environment.cluster_hosts.values()) or [environment]
    kinds: Counter[str] = Counter()
    for each in hosts:
        gpus = Counter(gpu.name for gpu in each.gpus).items()
        cpu = f"{each.host.cpu_model} ({each.host.logical_cpus} CPUs)"
        kinds[", ".join([cpu, *(f"{count} × {name}" for name, count in gpus)])] += 1
    return "; ".join(f"{count} hosts of {kind}" if count > 1 else kind for kind, count in kinds.items())


def describe_commit(source: Source | ReportSource) -> str:
    """Return a commit as text, or an empty string if it is unknown."""
    branch = f" on {source.branch}" if source.branch else ""
    return f"{source.commit[:10]}{branch}{' (with changes)' * bool(source.dirty)}" if source.commit else ""
