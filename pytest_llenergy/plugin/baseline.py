# SPDX-License-Identifier: Apache-2.0
"""The baseline of a run: the report of ``--energy-compare``, which each process reads once.

Tests of a file that was skipped at collection are not just unselected, so such files are noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.compare.comparison import describe_side, has_measurements
from pytest_llenergy.compare.gate import check_named_once
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.plugin.stash import SKIPPED_FILES
from pytest_llenergy.plugin.xdist import SKIPPED, worker_input_of
from pytest_llenergy.record.comparison import Baseline
from pytest_llenergy.record.defaults import SAVED
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import relative_path
from pytest_llenergy.report.saved import find_saved, is_saved_name
from pytest_llenergy.report.store import read_report

#: Beginning of the reason of a test that failed as expected, the only sign of it.
XFAIL = "xfail"


@dataclass(frozen=True)
class StoredBaseline:
    """A baseline, read and decoded.

    Attributes:
        origin: Its name in messages.
        report: The decoded report.
        records: The last attempt of each test, by record id.
    """

    origin: str
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
        found, lost = {record.id: record for record in records}, {}
        for name, before in self.records.items():
            if not before.counts or not before.rounds:
                continue
            if (record := found.get(name)) is None:
                lost[name] = explain_absent(before)
            elif record.status == "skipped":
                lost[name] = "skipped"
            elif record.status == "failed" and (record.reason or "").partition(":")[0] == XFAIL:
                lost[name] = "xfailed"
        return lost


BASELINE = pytest.StashKey[StoredBaseline | None]()


def baseline_of(config: pytest.Config) -> StoredBaseline | None:
    """Return the baseline of this process, read on first use; None without ``--energy-compare``.

    Raises:
        pytest.UsageError: If the file is not a usable baseline.
    """
    if BASELINE not in config.stash:
        text = settings_of(config).compare
        config.stash[BASELINE] = None if text is None else _load_baseline(config, text)
    return config.stash[BASELINE]


def _load_baseline(config: pytest.Config, text: str) -> StoredBaseline:
    source = f"{option_source(config, 'compare')}={text}"
    try:
        path = _resolve_baseline(config, text)
        report = read_report(path, lean=True)
        records = select_last_attempts(report.records, str(path))
    except LLEnergyError as error:
        raise usage_error(f"{source}: {str(error).removeprefix(f'{text}: ')}") from None
    # A complete run without tests is the baseline of the first benchmarks.
    if not has_measurements(records) and not (report.run.complete and not report.records):
        statuses = Counter(record.status for record in records.values())
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        raise usage_error(
            f"{source}: {path}: none of its {len(records)} tests can be compared "
            f"with{f' ({counts})' if counts else ''}; a baseline needs tests that pass, with measured rounds"
        )
    return StoredBaseline(relative_path(path), report, records)


def _resolve_baseline(config: pytest.Config, text: str) -> Path:
    """Return the file of a baseline. Raises ``ReportError`` for an unknown name."""
    if is_saved_name(text):
        return find_saved(config.rootpath / SAVED, text)
    given = config.getoption("energy_compare", None) is not None
    return (config.invocation_params.dir if given else config.rootpath) / text


def check_gate_options(config: pytest.Config) -> None:
    """Check the baseline and the gate options before anything is measured.

    Raises:
        pytest.UsageError: Options contradict each other, or the file is not a usable baseline.
    """
    # An ini file may define gates for the runs that have a baseline.
    if settings_of(config).compare is None and config.getoption("energy_fail_on", None) is not None:
        raise usage_error(
            "--energy-fail-on needs a baseline: add --energy-compare=FILE, or =NAME of --energy-save=NAME"
        )
    try:
        check_named_once(settings_of(config).fail_on)
    except LLEnergyError as error:
        raise usage_error(f"{option_source(config, 'fail_on')}: {error}") from None
    if baseline_of(config) is not None:
        _keep_baseline(config, str(settings_of(config).compare))


def _keep_baseline(config: pytest.Config, text: str) -> None:
    """Refuse to replace the baseline: a regression would fail once, and be the next baseline."""
    settings, path = settings_of(config), _resolve_baseline(config, text).resolve()
    saved = None if settings.save is None else saved_as(config, settings.save)
    for name, written in (("report", settings.report), ("save", saved)):
        if written is not None and written.resolve() == path:
            raise usage_error(
                f"{option_source(config, name)}: this would replace the baseline {relative_path(path)}; "
                "write to another name"
            )


class SkippedFiles:
    """Plugin object of pytest's process, and of each worker of pytest-xdist, which tells the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._paths = config.stash.setdefault(SKIPPED_FILES, set())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._paths.add(report.nodeid.partition("::")[0])

    def pytest_collection_finish(self) -> None:
        worker_input_of(self._config).send(SKIPPED, sorted(self._paths))


def is_skipped(config: pytest.Config, test: str) -> bool:
    """Whether the file of a test, a part of it or a folder above was skipped or failed at collection."""
    file = test.partition("::")[0]
    return any(f"{file}/".startswith(f"{each}/") for each in config.stash[SKIPPED_FILES])
