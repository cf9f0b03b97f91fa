# SPDX-License-Identifier: Apache-2.0
"""The baseline of a run, and what it says of each test.

Tests are judged where their record is made, in the process that ran them; each such process reads the
baseline once. Nothing here is imported by a run that compares nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.compare.comparison import (
    Criterion,
    MeasuredRecord,
    compare_records,
    compare_without_baseline,
    describe_side,
    has_measurements,
    incomplete_run_note,
    select_last_attempts,
)
from pytest_llenergy.compare.gate import Gate, Inconclusive, check_floor, rule_with_floor, select_criteria
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.comparison import Baseline, Comparison
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import BackendInfo, Record
from pytest_llenergy.model.report import Report
from pytest_llenergy.model.text import escape_surrogates
from pytest_llenergy.options import SAVED, Settings, saved_as, settings_of
from pytest_llenergy.report.provenance import collect_environment
from pytest_llenergy.report.store import (
    JOURNAL_SUFFIX,
    Location,
    decode_report_or_journal,
    is_url,
    location_name,
    read_file,
    read_report,
)
from pytest_llenergy.xdist import errand_of

NO_BASELINE = "no baseline was given (--energy-compare)"

#: Names of tests in one line.
MANY = 5


@dataclass(frozen=True)
class Stored:
    """A baseline as it was read. ``origin`` is how messages name it, ``path`` where it is on this host."""

    origin: str
    path: Path | None
    report: Report
    records: dict[str, Record]

    def told(self, seen: Iterable[str]) -> Baseline:
        """What the report says of it, once these tests have been seen."""
        absent = set(self.records).difference(seen)
        return Baseline(
            side=describe_side(self.report, self.origin), absent=[n for n in self.records if n in absent]
        )


class Gating:
    """What one process compares with. The baseline is read when it is first needed."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings

    @cached_property
    def stored(self) -> Stored | None:
        """The baseline; ``None`` where none was given. Raises ``pytest.UsageError`` for one that is none."""
        text = self._settings.compare
        if text is None:
            return None
        brought = errand_of(self._config).baseline
        if brought is not None:
            # The controller has looked at it.
            name, data = brought
            report = decode_report_or_journal(data, name, lean=True)
            return Stored(name, None, report, select_last_attempts(report.records, name))
        place = _place(self._config, text)
        name = text if isinstance(place, Path) else location_name(place)
        try:
            report = read_report(place, lean=True)
            records = select_last_attempts(report.records, location_name(place))
        except ReportError as error:
            raise pytest.UsageError(f"--energy-compare={name}: {error}") from None
        if not has_measurements(records):
            found = Counter(record.status for record in records.values())
            told = f" ({', '.join(f'{count} {status}' for status, count in found.items())})" if found else ""
            raise pytest.UsageError(
                f"--energy-compare={name}: {location_name(place)}: none of its {len(records)} tests can be "
                f"compared with{told}; a baseline has tests that pass, with measured rounds"
            )
        path = place if isinstance(place, Path) else None
        return Stored(name if path is None else _shown(path), path, report, records)

    @property
    def brought(self) -> tuple[str, bytes] | None:
        """The baseline for a process that may not have the file: its name and content."""
        if self.stored is None or self._settings.compare is None:
            return None
        return self.stored.origin, read_file(_place(self._config, self._settings.compare))

    @cached_property
    def _here(self) -> Environment:
        return collect_environment()

    def compared(self, record: Record, gate: Gate | None) -> list[Comparison]:
        """A test against its baseline, one metric after the other; empty where nobody asked for it."""
        own = gate.threshold if gate is not None else None
        fail_on = self._settings.fail_on
        common = rule_with_floor(self._settings.floor)
        stored = self.stored
        if stored is None:
            asked = select_criteria(fail_on, own, common) if fail_on or own is not None else []
            return [_ungated(record, each) for each in asked]
        if not record.rounds and own is None:
            return []
        record = _as_stored(record)
        before = stored.records.get(record.id)
        found = []
        for each in select_criteria(fail_on, own, common):
            if before is None:
                stopped = None if stored.report.run.complete else stored.origin
                found.append(compare_without_baseline(record, each, stopped))
            else:
                base = MeasuredRecord(before, stored.report.environment)
                found.append(compare_records(base, MeasuredRecord(record, self._here), each))
        return found


GATING = pytest.StashKey[Gating]()


def gating_of(config: pytest.Config) -> Gating:
    """That of this process."""
    if GATING not in config.stash:
        config.stash[GATING] = Gating(config, settings_of(config))
    return config.stash[GATING]


def check(config: pytest.Config) -> None:
    """Before anything is measured: options that contradict each other, and a baseline that is none.

    Raises ``pytest.UsageError``.
    """
    settings = settings_of(config)
    if settings.compare is None:
        # In an ini file it may wait for a baseline.
        if config.getoption("energy_fail_on", None) is not None:
            raise pytest.UsageError(
                "--energy-fail-on needs a baseline: add --energy-compare=FILE, or =NAME of --energy-save=NAME"
            )
        return
    try:
        check_floor(settings.fail_on, settings.floor)
    except PlanError as error:
        raise pytest.UsageError(f"--energy-fail-on: {error}") from None
    metrics = [each.metric for each in settings.fail_on]
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise pytest.UsageError(f"--energy-fail-on names {metric} twice; keep one of them")
    stored = gating_of(config).stored
    assert stored is not None
    if stored.path is None:
        return
    if settings.report is not None and _same(settings.report, stored.path):
        _refuse_overwriting(f"--energy-report={settings.report}", stored.path)
    if settings.save is not None and _same(saved_as(config, settings.save), stored.path):
        _refuse_overwriting(f"--energy-save={settings.save}", stored.path)


def _refuse_overwriting(option: str, path: Path) -> None:
    raise pytest.UsageError(
        f"{option} would replace the baseline {path} that --energy-compare reads, and with it what a "
        "regression is held against; write to another name"
    )


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _as_stored(record: Record) -> Record:
    """With names and parameters as a report has them: what it has no place for would differ from itself."""
    backend = record.backend
    return msgspec.structs.replace(
        record,
        id=escape_surrogates(record.id),
        params=msgspec.json.decode(
            msgspec.json.encode(escape_surrogates(record.params)), type=dict[str, Primitive]
        ),
        backend=msgspec.json.decode(msgspec.json.encode(backend), type=BackendInfo) if backend else None,
    )


def _ungated(record: Record, asked: Criterion) -> Comparison:
    return msgspec.structs.replace(compare_without_baseline(record, asked), verdict="new", reason=NO_BASELINE)


def _place(config: pytest.Config, text: str) -> Location:
    """What is meant. Raises ``pytest.UsageError`` for a name that was never saved."""
    if is_url(text):
        return text
    if "/" in text or text.endswith((".json", JOURNAL_SUFFIX)):
        given = config.getoption("energy_compare", None) is not None
        return (config.invocation_params.dir if given else config.rootpath) / text
    path = saved_as(config, text)
    if not path.exists():
        names = sorted(each.stem for each in path.parent.glob("*.json"))
        known = f"saved are: {', '.join(names)}" if names else f"nothing is saved in {path.parent}"
        raise pytest.UsageError(
            f"--energy-compare={text}: there is no {SAVED}/{text}.json; {known} (--energy-save={text} makes "
            "it; the name of a file ends in .json)"
        )
    return path


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def ungated_lines(stored: Stored | None, records: Sequence[Record], inconclusive: Inconclusive) -> list[str]:
    """What gates did not look at or could not tell, for people who would take silence for a pass."""
    comparisons = [each for record in records for each in record.comparisons]
    waiting = [each for each in comparisons if each.gated and each.reason == NO_BASELINE]
    lines = [f"not gated: {_tests(len({each.id for each in waiting}))}, {NO_BASELINE}"] if waiting else []
    if stored is None:
        return lines
    if not stored.report.run.complete:
        lines.append(incomplete_run_note(stored.origin))
    unsure = sum(each.gated and each.verdict == "inconclusive" for each in comparisons)
    if unsure and inconclusive == "warn":
        lines.append(
            f"inconclusive: {unsure} of {len(comparisons)}; more rounds (--energy-rounds) can tell, "
            "--energy-inconclusive=fail fails them"
        )
    windows = sum(not record.rounds and bool(record.windows) for record in records if record.counts)
    if windows:
        lines.append(f"not compared: {_tests(windows)} with windows of energy_meter only")
    absent = stored.told({record.id for record in records}).absent
    if absent:
        named = ", ".join(_short(name) for name in absent[:MANY])
        rest = f" and {len(absent) - MANY} more" if len(absent) > MANY else ""
        lines.append(f"in {stored.origin} and not in this run: {named}{rest}")
    return lines


def nothing_judged(records: Sequence[Record], settings: Settings, *, insisted: bool) -> str | None:
    """Why a run that was to be gated was not, in any test; ``None`` where one was judged.

    ``insisted`` is whether the command line asked for the gate: then a run without any measurement is not
    gated either, while one whose ini file asks may be one of other tests.
    """
    comparisons = [each for record in records for each in record.comparisons if each.gated]
    if settings.compare is None or any(each.rule_applied for each in comparisons):
        return None
    if not comparisons and not (insisted and settings.fail_on):
        return None
    if not records:
        return "nothing was gated: no test was measured"
    states = Counter[str](each.verdict for each in comparisons)
    if not comparisons:
        states = Counter(record.status for record in records)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"nothing was gated: {told}"


def _tests(count: int) -> str:
    return f"{count} test{'' if count == 1 else 's'}"


def _short(name: str) -> str:
    path, bracket, params = name.partition("[")
    return f"{path.rpartition('::')[2]}{bracket}{params}"
