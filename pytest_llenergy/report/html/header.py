# SPDX-License-Identifier: Apache-2.0
"""Top of a page: facts about the run, notes on it, and why tests have no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from pytest_llenergy.record.comparison import VERDICTS, ReportSource
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, RunInfo
from pytest_llenergy.record.text import count_tests, one_line, short_test_name
from pytest_llenergy.report.columns import meter_names, model_name
from pytest_llenergy.report.html.cases import TestSection, format_metric_of
from pytest_llenergy.report.html.parts import Cell, Reason
from pytest_llenergy.report.layout import record_labels
from pytest_llenergy.report.notes import list_notes, summary_flags
from pytest_llenergy.report.verdicts import needs_reason

#: Most names of models or backends in the header.
MAX_NAMES = 4

#: Most tests that are named with one reason.
MAX_TESTS = 12

#: Reasons in the order in which they are shown.
ORDER = ("failed", "crashed", *VERDICTS, "no joules", "measured", "attributed", "estimated", "skipped")

#: Metrics of a single test that are shown as numbers: name, and what it is called.
TILES = {
    "energy_per_output_token_j": "energy per token",
    "energy_j": "energy per iteration",
    "output_tokens_per_s": "throughput",
    "mean_power_w": "mean power",
    "duration_s": "time per iteration",
}


def run_facts(report: Report) -> list[tuple[str, str]]:
    """Return machine, model, backends, kind of joules, commit and time of a run."""
    records = report.records
    backends = (f"{each.backend.name} {each.backend.version}" for each in records if each.backend is not None)
    facts = [
        ("Machine", describe_machine(report.environment)),
        ("Model", _join(model_name(each).rpartition("/")[2] for each in records)),
        ("Backend", _join(backends)),
        ("Energy", describe_kind(records)),
        ("Commit", describe_commit(report.source.commit, report.source.dirty, report.source.branch)),
        ("Run", _describe_time(report.run)),
    ]
    return [(name, text) for name, text in facts if text]


def describe_machine(environment: Environment | None) -> str:
    """Return CPU and GPUs, such as ``AMD EPYC 9354 (64 CPUs), 2 × NVIDIA H100``, or those of a cluster."""
    if environment is None:
        return ""
    hosts = environment.cluster_hosts
    if not hosts:
        return _describe_host(environment)
    kinds = Counter(map(_describe_host, hosts.values()))
    count = f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    if len(kinds) == 1:
        return f"{count}{' of' * (len(hosts) > 1)}: {next(iter(kinds))}"
    return f"{count}: {'; '.join(f'{number} of {kind}' for kind, number in kinds.items())}"


def _describe_host(environment: Environment) -> str:
    host = environment.host
    boards = Counter(board.name for board in environment.gpus)
    gpus = (name if count == 1 else f"{count} × {name}" for name, count in boards.items())
    return ", ".join([f"{host.cpu_model} ({host.logical_cpus} CPUs)", *gpus])


def describe_kind(records: Sequence[Record]) -> str:
    """Return the kind of joules, or how many tests have each kind."""
    kinds = Counter(record.kind for record in records if record.kind is not None)
    if len(kinds) > 1:
        return f"mixed: {', '.join(f'{count_tests(count)} {kind}' for kind, count in kinds.items())}"
    if "estimated" in kinds:
        return "estimated"
    meters = _join(meter_names(record).partition(" (")[0] for record in records if record.kind)
    return "".join(kinds) + (f" ({meters})" if meters else "")


def describe_commit(commit: str | None, dirty: bool | None, branch: str | None = None) -> str:
    """Return a commit as text, or an empty string if it is unknown."""
    if commit is None:
        return ""
    return f"{commit[:10]}{f' on {branch}' if branch else ''}{' (with changes)' if dirty else ''}"


def describe_side(side: ReportSource) -> str:
    """Return the commit of a side, or where it was read from."""
    return describe_commit(side.commit, side.dirty) or side.origin


def _describe_time(run: RunInfo) -> str:
    try:
        start = datetime.fromisoformat(run.started_at.replace("Z", "+00:00"))
        end = datetime.fromisoformat((run.finished_at or run.started_at).replace("Z", "+00:00"))
        length_s = round((end - start).total_seconds())
    except (ValueError, TypeError):
        return run.started_at
    return f"{start:%Y-%m-%d %H:%M} UTC" + (f", {length_s} s" if length_s else "")


def _join(names: Iterable[str]) -> str:
    distinct = [name for name in dict.fromkeys(map(one_line, names)) if name not in ("", "-")]
    more = [f"{len(distinct) - MAX_NAMES} more"] if len(distinct) > MAX_NAMES else []
    return ", ".join([*distinct[:MAX_NAMES], *more])


def run_notes(cases: Sequence[TestSection]) -> list[str]:
    """Return the notes of the terminal's table, the most important first."""
    metered = [case.records["head"] for case in cases if case.records["head"].meters]
    labels = record_labels(metered)
    return [text for _, text in list_notes(metered, summary_flags(metered, labels), absolute=True)]


def single_values(record: Record) -> list[tuple[str, str]]:
    """Return the values of a run with a single result, and what they are."""
    return [
        (label, format_metric_of(record, name))
        for name, label in TILES.items()
        if record.value_of(name) is not None
    ]


def reasons(cases: Sequence[TestSection], shown: int) -> list[Reason]:
    """Return why tests have no result or which verdict, each reason once, the most urgent first.

    Args:
        cases: All tests.
        shown: Number of tests with a section to link to.
    """
    alike: dict[tuple[str, str], dict[str, Cell]] = {}
    for place, case in enumerate(cases):
        for state, text, suffix in _reasons(case):
            name = one_line(f"{short_test_name(case.id)}{suffix}")
            target = case.anchor if place < shown else ""
            alike.setdefault((state, one_line(text)), {})[case.id + suffix] = Cell(name, "", target)
    found = [Reason(state, text, list(tests.values())) for (state, text), tests in alike.items()]
    return sorted(found, key=lambda each: ORDER.index(each.state) if each.state in ORDER else len(ORDER))


def _reasons(case: TestSection) -> list[tuple[str, str, str]]:
    """Return states with their reasons, each with a suffix of the test's name for a window."""
    if case.comparisons:
        return [
            (each.verdict, "; ".join([each.reason, *each.notes, *each.differences]), "")
            for each in case.comparisons
            if needs_reason(each) or each.notes
        ]
    records = list(case.records.values())
    windows = [window for record in records for window in record.windows if window.energy_j is None]
    unmeasured = {window.reason for window in windows}
    found = [
        (each.status, each.reason or "", "")
        for each in records
        if each.status != "measured" and not (each.status == "invalid" and each.reason in unmeasured)
    ]
    return [*found, *(("no joules", window.reason or "", f" · {window.name}") for window in windows)]
