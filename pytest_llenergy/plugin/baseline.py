# SPDX-License-Identifier: Apache-2.0
"""The baseline of a run: the report of ``--energy-compare``, which each process reads once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.compare.comparison import describe_side, has_measurements
from pytest_llenergy.compare.gate import check_named_once
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.plugin.xdist import BaselineFile, worker_input_of
from pytest_llenergy.record.comparison import Baseline
from pytest_llenergy.record.defaults import SAVED
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import relative_path
from pytest_llenergy.report.saved import find_saved, is_saved_name
from pytest_llenergy.report.store import decode_report_or_journal, read_file, read_report

NO_BASELINE = "no baseline was given (--energy-compare)"

#: Why a test that this run did not select, or not reach, was not compared.
ABSENT = "not in this run"

#: Beginning of the reason of a test that failed as expected.
XFAIL = "xfail"


@dataclass(frozen=True)
class StoredBaseline:
    """A baseline, read and decoded.

    Attributes:
        origin: Its name in messages.
        path: Its file; None in a worker of pytest-xdist.
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
        absent = [name for name in self.records if name not in compared]
        return Baseline(side=describe_side(self.report, self.origin), absent=absent)

    def list_lost(self, records: Sequence[Record], explain_absent: Callable[[Record], str]) -> dict[str, str]:
        """Return the tests that the baseline measured and this run did not compare, with the reason.

        A run of part of a suite loses tests too. Failed tests are not lost, since pytest reports them.

        Args:
            records: The last attempt of each test of the run.
            explain_absent: Gives the reason why a test has none of these.
        """
        lost = {name: explain_absent(self.records[name]) for name in self.describe(records).absent}
        for record in records:
            if record.status == "skipped" or is_xfailed(record):
                lost[record.id] = "skipped" if record.status == "skipped" else "xfailed"
        usable = (name for name, each in self.records.items() if each.counts and each.rounds)
        return {name: lost[name] for name in usable if name in lost and not is_xfailed(self.records[name])}


def is_xfailed(record: Record) -> bool:
    """Whether a test failed as expected; its reason is the only sign of it."""
    reason = record.reason or ""
    return record.status == "failed" and (reason == XFAIL or reason.startswith(f"{XFAIL}: "))


BASELINE = pytest.StashKey[StoredBaseline | None]()


def baseline_of(config: pytest.Config) -> StoredBaseline | None:
    """Return the baseline of this process, read on first use; None without ``--energy-compare``.

    Raises:
        pytest.UsageError: If the file is not a usable baseline.
    """
    if BASELINE not in config.stash:
        config.stash[BASELINE] = _load_baseline(config)
    return config.stash[BASELINE]


def _load_baseline(config: pytest.Config) -> StoredBaseline | None:
    text = settings_of(config).compare
    if text is None:
        return None
    sent = worker_input_of(config).baseline
    if sent is not None:
        # The controller has already checked it.
        name, data = sent
        report = decode_report_or_journal(data, name)
        return StoredBaseline(name, None, report, select_last_attempts(report.records, name))
    source = option_source(config, "compare")
    path = _resolve_baseline(config, text)
    try:
        report = read_report(path)
        records = select_last_attempts(report.records, str(path))
    except ReportError as error:
        raise usage_error(f"{source}={text}: {str(error).removeprefix(f'{text}: ')}") from None
    # A complete run without tests is the baseline of the first benchmarks.
    if not has_measurements(records) and not (report.run.complete and not report.records):
        statuses = Counter(record.status for record in records.values())
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        found = f" ({counts})" if counts else ""
        raise usage_error(
            f"{source}={text}: {path}: none of its {len(records)} tests can be "
            f"compared with{found}; a baseline needs tests that pass, with measured rounds"
        )
    return StoredBaseline(relative_path(path), path, report, records)


def read_baseline_file(config: pytest.Config) -> BaselineFile | None:
    """Return name and content of the baseline, for a worker that may not have the file."""
    text, stored = settings_of(config).compare, baseline_of(config)
    if stored is None or text is None:
        return None
    return stored.origin, read_file(_resolve_baseline(config, text))


def _resolve_baseline(config: pytest.Config, text: str) -> Path:
    """Resolve the value of ``--energy-compare``. Raises ``pytest.UsageError`` for an unknown name."""
    if not is_saved_name(text):
        given = config.getoption("energy_compare", None) is not None
        return (config.invocation_params.dir if given else config.rootpath) / text
    try:
        return find_saved(config.rootpath / SAVED, text)
    except ReportError as error:
        raise usage_error(f"{option_source(config, 'compare')}={text}: {error}") from None


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
        check_named_once(settings.fail_on)
    except PlanError as error:
        raise usage_error(f"{option_source(config, 'fail_on')}: {error}") from None
    stored = baseline_of(config)
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
