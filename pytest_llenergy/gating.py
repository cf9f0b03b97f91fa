# SPDX-License-Identifier: Apache-2.0
"""Compare each test of a run with its baseline.

Tests are compared in the process that ran them, so that a broken gate fails the test itself. Each process
reads the baseline once. A run that compares nothing does not import this module.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import (
    MeasuredRecord,
    compare_records,
    compare_without_baseline,
    describe_side,
    has_measurements,
    incomplete_run_note,
)
from pytest_llenergy.compare.gate import (
    Gate,
    check_floor,
    check_named_once,
    common_rule,
    explain_failure,
    list_void_gates,
    select_criteria,
)
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import (
    Work,
    find_renamed,
    group_by_work,
    mark_renamed,
    select_last_attempts,
)
from pytest_llenergy.errors import PlanError, ReportError, warn_caller
from pytest_llenergy.history.spread import StoredEstimator
from pytest_llenergy.history.store import open_store
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.comparison import Baseline, Comparison
from pytest_llenergy.model.defaults import HISTORY, SAVED
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import BackendInfo, Record
from pytest_llenergy.model.report import Report
from pytest_llenergy.model.text import count_tests, escape_surrogates, relative_path
from pytest_llenergy.options.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.options.table import Settings
from pytest_llenergy.report.provenance import collect_environment
from pytest_llenergy.report.remote import is_url
from pytest_llenergy.report.saved import find_saved, is_saved_name
from pytest_llenergy.report.store import (
    Location,
    decode_report_or_journal,
    location_name,
    read_file,
    read_report,
)
from pytest_llenergy.report.verdicts import suggest_remedy
from pytest_llenergy.xdist import BaselineFile, record_id, worker_input_of

NO_BASELINE = "no baseline was given (--energy-compare)"

#: Most names of tests in one line.
MAX_NAMES = 5

#: Beginning of the reason of a test that failed as expected.
XFAIL = "xfail"


@dataclass(frozen=True)
class StoredBaseline:
    """A baseline, read and decoded.

    Attributes:
        origin: Its name in messages.
        path: Its file on this host; None if it came from elsewhere.
        report: The decoded report.
        records: The last attempt of each test, by record id.
    """

    origin: str
    path: Path | None
    report: Report
    records: dict[str, Record]

    def describe(self, records: Sequence[Record]) -> Baseline:
        """Describe the baseline for the report of a run with these records."""
        compared = {record.id for record in records}
        compared |= {each.renamed_from or each.id for record in records for each in record.comparisons}
        absent = [name for name in self.records if name not in compared]
        return Baseline(side=describe_side(self.report, self.origin), absent=absent)

    def list_lost(self, records: Sequence[Record]) -> dict[str, str]:
        """Return the tests that the baseline measured and this run did not compare, with the reason.

        A run of part of a suite loses tests too. Failed tests are not lost, since pytest reports them.
        """
        lost = dict.fromkeys(self.describe(records).absent, "not in this run")
        for record in records:
            if record.status == "skipped" or is_xfailed(record):
                lost[record.id] = "skipped" if record.status == "skipped" else "xfailed"
        usable = (name for name, each in self.records.items() if each.counts and each.rounds)
        return {name: lost[name] for name in usable if name in lost and not is_xfailed(self.records[name])}

    def list_dropped_marks(self, records: Sequence[Record]) -> dict[str, str]:
        """Return the tests of which a mark gated a metric in the baseline and nothing gates it now."""
        dropped = {}
        for record in records:
            gated = {each.metric for each in record.comparisons if each.gated}
            old = next((each.renamed_from for each in record.comparisons if each.renamed_from), record.id)
            before = self.records[old].comparisons if record.counts and old in self.records else []
            metrics = [each.metric for each in before if each.from_mark and each.metric not in gated]
            if metrics:
                dropped[record.id] = ", ".join(metrics)
        return dropped


def is_xfailed(record: Record) -> bool:
    """Whether a test failed as expected; its reason is the only sign of it."""
    reason = record.reason or ""
    return record.status == "failed" and (reason == XFAIL or reason.startswith(f"{XFAIL}: "))


class Gating:
    """Compares tests of one process with the baseline, which is read when first needed."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        # Tests of the baseline that were not collected, as far as no other was found to be one of them.
        self._gone: dict[Work, list[Record]] | None = None

    @cached_property
    def stored(self) -> StoredBaseline | None:
        """The baseline; None without ``--energy-compare``.

        Raises:
            pytest.UsageError: If the file is not a usable baseline.
        """
        text = self._settings.compare
        if text is None:
            return None
        sent = worker_input_of(self._config).baseline
        if sent is not None:
            # The controller has already checked it.
            name, data = sent
            report = decode_report_or_journal(data, name, lean=True)
            return StoredBaseline(name, None, report, select_last_attempts(report.records, name))
        source = option_source(self._config, "compare")
        place = _resolve_baseline(self._config, text)
        name = text if isinstance(place, Path) else location_name(place)
        try:
            report = read_report(place, lean=True)
            records = select_last_attempts(report.records, location_name(place))
        except ReportError as error:
            raise usage_error(f"{source}={name}: {str(error).removeprefix(f'{name}: ')}") from None
        # A complete run without tests is the baseline of the first benchmarks.
        if not has_measurements(records) and not (report.run.complete and not report.records):
            statuses = Counter(record.status for record in records.values())
            counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
            found = f" ({counts})" if counts else ""
            raise usage_error(
                f"{source}={name}: {location_name(place)}: none of its {len(records)} tests can be "
                f"compared with{found}; a baseline needs tests that pass, with measured rounds"
            )
        path = place if isinstance(place, Path) else None
        return StoredBaseline(name if path is None else relative_path(path), path, report, records)

    def read_baseline_file(self) -> BaselineFile | None:
        """Return name and content of the baseline, for a worker that may not have the file."""
        if self.stored is None or self._settings.compare is None:
            return None
        return self.stored.origin, read_file(_resolve_baseline(self._config, self._settings.compare))

    @cached_property
    def _environment(self) -> Environment:
        return collect_environment()

    @cached_property
    def _estimator(self) -> StoredEstimator:
        folder = self._config.rootpath / HISTORY
        store = open_store(str(folder)) if folder.is_dir() else None
        return StoredEstimator(store, self._environment, _warn_always)

    def compare(
        self, record: Record, gate: Gate | None, collected: Sequence[pytest.Item]
    ) -> list[Comparison]:
        """Compare a test with its baseline in every metric that the options or its gate names.

        Args:
            record: The record of the test.
            gate: Its gate from a mark.
            collected: Tests of this run: others of the baseline may have been renamed.
        """
        threshold = gate.threshold if gate is not None else None
        fail_on = self._settings.fail_on
        common = common_rule(self._settings.floor, self._settings.agreement)
        stored = self.stored
        if stored is None:
            criteria = select_criteria(fail_on, threshold, common) if fail_on or threshold is not None else []
            return [_ungated(record, each) for each in criteria]
        record = _as_stored(record)
        renamed = self._match_renamed(record, stored, collected)
        before = stored.records.get(renamed.get(record.id, record.id))
        if before is not None and renamed:
            before = msgspec.structs.replace(before, id=record.id)
        measured_before = before is not None and before.rounds and self._settings.removed == "fail"
        criteria = select_criteria(fail_on, threshold, common)
        if not record.rounds and threshold is None and not measured_before:
            # Windows of energy_meter are not compared; metrics that the test adds itself are.
            criteria = [each for each in criteria if each.metric in record.custom]
        comparisons = []
        for each in criteria:
            if before is None:
                incomplete = None if stored.report.run.complete else stored.origin
                comparisons.append(compare_without_baseline(record, each, incomplete))
            else:
                base = MeasuredRecord(before, stored.report.environment)
                head = MeasuredRecord(record, self._environment)
                found = compare_records(base, head, each, estimator=self._estimator)
                comparisons.append(mark_renamed(self._explain_missing(found, record), renamed))
        return comparisons

    def _explain_missing(self, comparison: Comparison, record: Record) -> Comparison:
        """Give the reason for a metric that the baseline has, if a hook may add it after the gate."""
        metric = comparison.metric
        missing = comparison.verdict == "invalid" and comparison.base is not None
        if not missing or metric in METRICS or metric in record.metrics:
            return comparison
        if not self._config.hook.pytest_llenergy_record.get_hookimpls():
            return comparison
        reason = f"no {metric} yet: hooks add metrics after the gates; use llenergy compare"
        return msgspec.structs.replace(comparison, reason=reason)

    def _match_renamed(
        self, record: Record, stored: StoredBaseline, collected: Sequence[pytest.Item]
    ) -> dict[str, str]:
        """Return the id that a test has in the baseline by its present id; empty without a match."""
        if record.id in stored.records:
            return {}
        if self._gone is None:
            worker = worker_input_of(self._config)
            ids = {record_id(each.nodeid, label=worker.label, grouped=worker.grouped) for each in collected}
            self._gone = group_by_work(each for name, each in stored.records.items() if name not in ids)
        old = find_renamed(record, self._gone)
        if old is None:
            return {}
        self._gone = {work: records for work, records in self._gone.items() if old not in records}
        return {record.id: old.id}


GATING = pytest.StashKey[Gating]()


def gating_of(config: pytest.Config) -> Gating:
    """Return the gating of this process, created on first use."""
    if GATING not in config.stash:
        config.stash[GATING] = Gating(config, settings_of(config))
    return config.stash[GATING]


def check_gate_options(config: pytest.Config) -> None:
    """Check the baseline and the gate options before anything is measured.

    Raises:
        pytest.UsageError: Options contradict each other, or the file is not a usable baseline.
    """
    settings = settings_of(config)
    if settings.compare is None:
        # An ini file may define gates for the runs that have a baseline.
        if config.getoption("energy_fail_on", None) is not None:
            raise usage_error(
                "--energy-fail-on needs a baseline: add --energy-compare=FILE, or =NAME of --energy-save=NAME"
            )
        return
    try:
        check_floor(settings.fail_on, settings.floor)
        check_named_once(settings.fail_on)
    except PlanError as error:
        raise usage_error(f"{option_source(config, 'fail_on')}: {error}") from None
    stored = gating_of(config).stored
    assert stored is not None
    if stored.path is None:
        return
    if settings.report is not None and _same(settings.report, stored.path):
        _refuse_overwriting(f"{option_source(config, 'report')}={settings.report}", stored.path)
    if settings.save is not None and _same(saved_as(config, settings.save), stored.path):
        _refuse_overwriting(f"{option_source(config, 'save')}={settings.save}", stored.path)


def _refuse_overwriting(option: str, path: Path) -> None:
    raise usage_error(
        f"{option}: this would replace the baseline {path} that --energy-compare reads; write to another name"
    )


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _as_stored(record: Record) -> Record:
    """Convert names and parameters as writing a report would, so that equal ones compare equal."""
    backend = record.backend
    return msgspec.structs.replace(
        record,
        id=escape_surrogates(record.id),
        params=msgspec.json.decode(
            msgspec.json.encode(escape_surrogates(record.params)), type=dict[str, Primitive]
        ),
        backend=msgspec.json.decode(msgspec.json.encode(backend), type=BackendInfo) if backend else None,
    )


def _warn_always(message: str) -> None:
    """Issue a warning that fails no test, even if warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warn_caller(message)


def _ungated(record: Record, criterion: Criterion) -> Comparison:
    return msgspec.structs.replace(
        compare_without_baseline(record, criterion), verdict="new", reason=NO_BASELINE
    )


def _resolve_baseline(config: pytest.Config, text: str) -> Location:
    """Resolve the value of ``--energy-compare``. Raises ``pytest.UsageError`` for an unknown name."""
    if is_url(text):
        return text
    if not is_saved_name(text):
        given = config.getoption("energy_compare", None) is not None
        return (config.invocation_params.dir if given else config.rootpath) / text
    try:
        return find_saved(config.rootpath / SAVED, text)
    except ReportError as error:
        raise usage_error(f"{option_source(config, 'compare')}={text}: {error}") from None


def describe_ungated(
    stored: StoredBaseline | None, records: Sequence[Record], settings: Settings, *, with_lost: bool = True
) -> list[str]:
    """Return a line for each reason why gates did not cover, or could not decide on, some tests.

    Args:
        stored: The baseline; None without one.
        records: The last attempt of each test of the run.
        settings: Options of the run.
        with_lost: Whether to name the tests that were lost: an error may do so.
    """
    comparisons = [each for record in records for each in record.comparisons]
    waiting = [each for each in comparisons if each.gated and each.reason == NO_BASELINE]
    lines = (
        [f"not gated: {count_tests(len({each.id for each in waiting}))}, {NO_BASELINE}"] if waiting else []
    )
    if stored is None:
        return lines
    if not stored.report.run.complete:
        lines.append(incomplete_run_note(stored.origin))
    unsure = [each for each in comparisons if each.gated and each.verdict == "inconclusive"]
    if unsure and settings.inconclusive == "warn":
        lines.append(
            f"inconclusive: {len(unsure)} of {len(comparisons)}; "
            f"{suggest_remedy(unsure, 'more rounds (--energy-rounds)')}, "
            "--energy-inconclusive=fail fails such tests"
        )
    windows = sum(not record.rounds and bool(record.windows) for record in records if record.counts)
    if windows:
        lines.append(f"not compared: {count_tests(windows)} with windows of energy_meter only")
    renamed = [each for each in comparisons if each.renamed_from is not None]
    lines += [_describe_renamed(each.id, str(each.renamed_from)) for each in renamed]
    lost = stored.list_lost(records)
    if lost and with_lost and settings.removed != "pass":
        lines.append(f"in {stored.origin} but not compared: {_name_lost(lost)}")
    dropped = stored.list_dropped_marks(records)
    if dropped and settings.removed == "warn":
        lines.append(_describe_dropped(stored, dropped))
    looser = _list_looser_marks(stored, comparisons, settings)
    if looser:
        lines.append(f"looser by a mark energy_gate: {_name_lost(looser)}")
    if comparisons and all(each.verdict == "new" for each in comparisons) and not stored.records:
        lines.append(f"no baseline: {count_tests(len({each.id for each in comparisons}), 'new ')}")
    return lines


def _list_looser_marks(
    stored: StoredBaseline, comparisons: Sequence[Comparison], settings: Settings
) -> dict[str, str]:
    """Return the tests whose marks allow more than an option or the mark in the baseline does."""
    looser = {}
    options = {each.metric: each.relative for each in settings.fail_on}
    for now in comparisons:
        if not now.from_mark or now.rule is None:
            continue
        record = stored.records.get(now.renamed_from or now.id)
        before = record.comparisons if record is not None else []
        marks = [
            each.rule.threshold
            for each in before
            if each.from_mark and each.metric == now.metric and each.rule
        ]
        strict = min([*marks, options.get(now.metric, now.rule.threshold)])
        if strict < now.rule.threshold:
            values = f"{now.rule.threshold * 100:.3g}% in place of {strict * 100:.3g}%"
            looser[now.id] = f"{now.metric}: {values}"
    return looser


def _describe_renamed(new: str, old: str) -> str:
    names = _function_name(new), _function_name(old)
    return f"{names[0]} was {names[1]}" if names[0] != names[1] else f"{new} was {old}"


def _describe_dropped(stored: StoredBaseline, dropped: Mapping[str, str]) -> str:
    return f"energy_gate of {count_tests(len(dropped))} in {stored.origin} is gone: {_name_lost(dropped)}"


def _name_lost(lost: Mapping[str, str]) -> str:
    named = [f"{_function_name(name)} ({why})" for name, why in lost.items()]
    return ", ".join(named[:MAX_NAMES]) + (
        f" and {len(lost) - MAX_NAMES} more" if len(lost) > MAX_NAMES else ""
    )


def list_gate_errors(
    stored: StoredBaseline | None, records: Sequence[Record], settings: Settings, *, on_command_line: bool
) -> list[str]:
    """Return a line for each gate that was requested and not checked, although no test failed by it.

    Args:
        stored: The baseline; None without one.
        records: All attempts of the tests of the run, in order.
        settings: Options of the run.
        on_command_line: Whether ``--energy-fail-on`` or ``--energy-compare`` is on the command line. Then a
            run without measurements is an error; an ini file may apply to other runs.
    """
    if stored is None:
        return []
    last = {record.id: record for record in records}
    lines = [
        f"{_function_name(record.id)} ran again after its gate had failed, which a rerun does not undo: {why}"
        for record in records
        for each in record.comparisons
        if last[record.id] is not record
        and last[record.id].counts
        and not last[record.id].failed_gate
        and each.gated
        and each.verdict == "regressed"
        and (why := explain_failure(each, settings.inconclusive)) is not None
    ]
    if last or on_command_line:
        lost = stored.list_lost([*last.values()])
        if not settings.fail_on:
            # Those that a mark gated.
            lost = {
                name: why
                for name, why in lost.items()
                if any(each.from_mark for each in stored.records[name].comparisons)
            }
        if lost and settings.removed == "fail":
            lines.append(
                f"{count_tests(len(lost))} of {stored.origin} not compared: {_name_lost(lost)}; "
                "--energy-removed=warn accepts this"
            )
        dropped = stored.list_dropped_marks([*last.values()])
        if dropped and settings.removed == "fail":
            lines.append(f"{_describe_dropped(stored, dropped)}; --energy-removed=warn accepts this")
    nothing = _explain_nothing_gated([*last.values()], stored, settings, on_command_line=on_command_line)
    if nothing is not None:
        return [*lines, nothing]
    named = {each.metric for each in settings.fail_on}
    comparisons = [each for record in last.values() for each in record.comparisons]
    return lines + list_void_gates(each for each in comparisons if each.gated or each.metric in named)


def _explain_nothing_gated(
    records: Sequence[Record], stored: StoredBaseline, settings: Settings, *, on_command_line: bool
) -> str | None:
    """Explain why no gate was checked although some were requested; return None if one was."""
    comparisons = [each for record in records for each in record.comparisons if each.gated]
    if any(each.rule_applied for each in comparisons):
        return None
    if not comparisons and not (on_command_line and settings.fail_on):
        return None
    if not records:
        return "nothing was gated: no test was measured"
    if not stored.records:
        return None
    states = Counter[str](each.verdict for each in comparisons)
    if not comparisons:
        states = Counter(record.status for record in records)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"nothing was gated: {counts}"


def _function_name(name: str) -> str:
    path, bracket, params = name.partition("[")
    return f"{path.rpartition('::')[2]}{bracket}{params}"
