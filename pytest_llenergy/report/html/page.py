# SPDX-License-Identifier: Apache-2.0
"""The HTML page of one report, of two compared reports, or of a paired report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import filterfalse
from typing import Any, NamedTuple

import pytest_llenergy
from pytest_llenergy.compare.history.trend import Trend
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison, ReportSource
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, Source
from pytest_llenergy.record.text import one_line, short_test_name, shorten
from pytest_llenergy.report.columns import meter_names, scales_differ
from pytest_llenergy.report.html import figures, tables
from pytest_llenergy.report.html.charts import Chart, RowChart
from pytest_llenergy.report.html.figures import PER_ITERATION, PER_TOKEN, writes_tokens
from pytest_llenergy.report.html.tables import Table, state_of
from pytest_llenergy.report.layout import record_labels
from pytest_llenergy.report.load_curves import HEADS, curve_rows, describe_failure
from pytest_llenergy.report.notes import list_notes, summary_flags
from pytest_llenergy.report.verdicts import describe_noise, format_change_and_limits, sort_by_verdict

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
    notes: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    folded: Sequence[Table]


def require_html_extra() -> None:
    """Raise ``ReportError`` if the extra ``html`` is not installed."""
    if find_spec("jinja2") is None:
        raise ReportError("HTML needs jinja2: pip install 'pytest-llenergy[html]'")


def render_template(**variables: Any) -> str:
    """Fill the template of a page: every text is escaped and put on one line.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
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


def render_report(report: Report, trends: Sequence[Trend] = ()) -> str:
    """Render one report as a page: the last attempt of each test, with its trend.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    last = {record.id: record for record in report.records}
    comparisons = sort_by_verdict([each for record in last.values() for each in record.comparisons])
    anchors = anchors_of([*(each.id for each in comparisons if each.id in last), *last])
    records = [last[test] for test in anchors]
    backends = [each.backend for each in records if each.backend is not None]
    metered = [each for each in records if each.meters]
    notes = [] if report.run.complete else ["The run did not finish; its remaining tests are missing."]
    facts = [
        ("Machine", describe_machine(report.environment)),
        ("Model", ", ".join(dict.fromkeys(each.model.rpartition("/")[2] for each in backends))),
        ("Backend", ", ".join(dict.fromkeys(f"{each.name} {each.version}" for each in backends))),
        ("Meter", ", ".join(dict.fromkeys(map(meter_names, metered)))),
        ("Commit", describe_commit(report.source)),
        ("Started", report.run.started_at),
    ]
    if report.baseline is not None:
        facts.append(("Baseline", report.baseline.side.origin))
        absent = ", ".join(report.baseline.absent)
        notes += [f"In the baseline but not in this run: {absent}"] if absent else []
    notes += [text for _, text in list_notes(metered, summary_flags(metered, record_labels(metered)))]
    found = [each for each in records if each.counts]
    absolute = scales_differ(found)
    bars = partial(figures.energy_bars, anchors=anchors, absolute=absolute)
    writing = list(filter(writes_tokens, found))
    others = list(filterfalse(writes_tokens, found))
    return _render(
        "Energy report",
        map(state_of, records),
        facts,
        notes,
        {"value": report},
        anchors,
        comparisons,
        charts=figures.energy_against_speed(found, absolute=absolute),
        bars=[*bars(writing, PER_TOKEN), *bars(others, PER_ITERATION)],
        tests=[*tables.tests(records, anchors), *tables.windows(records, anchors)],
        trends=trends,
    )


def render_compared(
    base: Report, head: Report, compared: ComparedReports, *, pairs: str | None = None
) -> str:
    """Render two reports and their comparison as a page.

    Args:
        pairs: Stages of a run that measured both sides alternately, such as ``6+6``.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    comparisons = sort_by_verdict(compared.comparisons)
    records = [each.id for report in (head, base) for each in report.records]
    facts = [
        ("Head", describe_commit(compared.head) or compared.head.origin),
        ("Base", describe_commit(compared.base) or compared.base.origin),
        ("Order", f"{pairs} pairs, measured alternately" if pairs is not None else ""),
        ("Devices", "; ".join(compared.devices)),
    ]
    states = [each.verdict for each in comparisons]
    anchors, sides = anchors_of([*(each.id for each in comparisons), *records]), {"base": base, "head": head}
    return _render("Energy comparison", states, facts, compared.notes, sides, anchors, comparisons)


def anchors_of(tests: Iterable[str]) -> dict[str, str]:
    """Return the id in the page of each test, in their order; an empty one for those without a section."""
    distinct = dict.fromkeys(tests)
    return {test: f"t{number}" * (number <= MAX_SECTIONS) for number, test in enumerate(distinct, 1)}


def _render(
    title: str,
    states: Iterable[str],
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    reports: Mapping[str, Report],
    anchors: Mapping[str, str],
    comparisons: Sequence[Comparison],
    *,
    charts: Sequence[Chart] = (),
    bars: Sequence[RowChart] = (),
    tests: Sequence[Table] = (),
    trends: Sequence[Trend] = (),
) -> str:
    numbers = Counter(states)
    counts = [(state, numbers[state]) for state in STATES if numbers[state]]
    sides = {side: {record.id: record for record in each.records} for side, each in reports.items()}
    verdicts: dict[str, list[Comparison]] = {test: [] for test in anchors}
    for each in comparisons:
        verdicts.setdefault(each.id, []).append(each)
    machines = {side: tables.machine_of(each) for side, each in reports.items()}
    machine = tables.side_by_side("Machine, software and run", machines)
    records = [record for side in sides.values() for record in side.values()]
    reasons = tables.reasons(comparisons, [] if comparisons else records)
    return render_template(
        title=f"{title}: {', '.join(f'{count} {state}' for state, count in counts) or 'nothing to show'}",
        counts=counts,
        facts=[*facts, ("Noise", describe_noise(comparisons).removeprefix("noise "))],
        notes=notes,
        charts=charts,
        row_charts=[*figures.verdict_intervals(comparisons, anchors), *bars],
        overview=[*tables.verdicts(comparisons, anchors), *tests, *reasons],
        sections=[
            _section(test, anchors[test], sides, verdicts[test], trends)
            for test in list(anchors)[:MAX_SECTIONS]
        ],
        left_out=max(0, len(anchors) - MAX_SECTIONS),
        closing=[*tables.rules(comparisons), *tables.meters(records), *machine],
        footer="±: standard uncertainty (k = 1), for comparing tests of the same devices and meters. "
        "Metrics are per iteration, medians over the valid rounds.",
    )


def _section(
    test: str,
    anchor: str,
    sides: Mapping[str, Mapping[str, Record]],
    comparisons: Sequence[Comparison],
    trends: Sequence[Trend],
) -> Section:
    records = {side: found[test] for side, found in sides.items() if test in found}
    notes = [f"{each.metric}: {each.reason}" for each in comparisons]
    notes += [note for each in comparisons for note in [*each.notes, *each.differences]]
    charts = [chart for each in trends if each.id == test for chart in figures.trend_chart(each)]
    loads: list[Table] = []
    values: list[str] = []
    for side, record in records.items():
        name = f", {side}" if len(records) > 1 else ""
        notes += [f"{record.status}: {record.reason}"] if record.reason else []
        notes += [f"{flag.severity} {flag.name}: {flag.detail}" for flag in record.flags]
        metric = record.metrics.get(PER_TOKEN if writes_tokens(record) else PER_ITERATION)
        if metric is not None and metric.value is not None:
            values.append(format_quantity(metric.value, metric.uncertainty, metric.unit))
        if (curve := record.load_curve) is not None:
            charts += figures.load_chart(curve, name)
            columns = [*(f"#{head}" for head in HEADS[:-1]), HEADS[-1]]
            loads += tables.table(f"Loads{name}", columns, curve_rows(curve))
            notes += filter(None, [describe_failure(curve)])
    settings = {side: tables.settings_of(record) for side, record in records.items()}
    state = next(iter([each.verdict for each in comparisons] or map(state_of, records.values())), "")
    change = [format_change_and_limits(each) for each in comparisons[:1] if each.ratio is not None]
    return Section(
        anchor,
        test,
        state,
        " ".join([" → ".join(values), *change]),
        list(dict.fromkeys(notes)),
        charts,
        [*tables.metrics(records), *loads],
        [*tables.rounds(records), *tables.side_by_side("Settings", settings)],
    )


def describe_machine(environment: Environment | None) -> str:
    """Return CPU and GPUs of the measured hosts, such as ``AMD EPYC 9354 (64 CPUs), 2 × NVIDIA H100``."""
    hosts = [] if environment is None else list(environment.cluster_hosts.values()) or [environment]
    kinds = []
    for each in hosts:
        gpus = Counter(gpu.name for gpu in each.gpus).items()
        cpu = f"{each.host.cpu_model} ({each.host.logical_cpus} CPUs)"
        kinds.append(", ".join([cpu, *(f"{count} × {name}" for name, count in gpus)]))
    return "; ".join(
        f"{count} hosts of {kind}" if count > 1 else kind for kind, count in Counter(kinds).items()
    )


def describe_commit(source: Source | ReportSource) -> str:
    """Return a commit as text, or an empty string if it is unknown."""
    branch = f" on {source.branch}" if source.branch else ""
    return f"{source.commit[:10]}{branch}{' (with changes)' * bool(source.dirty)}" if source.commit else ""
