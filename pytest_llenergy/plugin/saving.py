# SPDX-License-Identifier: Apache-2.0
"""Tests that a report of ``--energy-save=NAME`` has and a run with that name would lose."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests, relative_path
from pytest_llenergy.report.store import read_report


@dataclass(frozen=True)
class SavedReport:
    """The report that a run is to replace: its file, and the tests that it has measured."""

    path: Path
    measured: Sequence[str]

    def describe(self, names: Sequence[str]) -> str:
        """Describe some of its tests by their number and one name."""
        tests = count_tests(len(self.measured))
        return f"{len(names)} of {tests} of {relative_path(self.path)}, such as {names[0]}"

    def list_missing(self, records: Collection[Record], root: Path) -> tuple[list[str], list[str]]:
        """Return the tests that a run has not measured: those that are left, and those that are gone."""
        measured = {record.id for record in records if record.counts}
        missing = [name for name in self.measured if name not in measured]
        left = {name for name in missing if _is_left(name, root)}
        return [name for name in missing if name in left], [name for name in missing if name not in left]


def _is_left(test: str, root: Path) -> bool:
    """Whether the file of a test names its function or its class, whose methods may be inherited."""
    file, *names = test.partition("[")[0].split("::")
    try:
        words = set(re.findall(r"\w+", (root / file).read_text("utf-8", "replace")))
    except OSError:
        return False
    return any(name in words for name in names)


def read_saved(config: pytest.Config) -> SavedReport | None:
    """Read the report that ``--energy-save`` is to replace; None if there is none.

    Raises:
        pytest.UsageError: The file is no report.
    """
    name = settings_of(config).save
    path = None if name is None else saved_as(config, name)
    if path is None or not path.exists():
        return None
    try:
        records = select_last_attempts(read_report(path).records, str(path))
    except ReportError as error:
        source = f"{option_source(config, 'save')}={name}"
        raise usage_error(f"{source}: {error}; save under another name, or delete the file") from None
    return SavedReport(path, [name for name, each in records.items() if each.counts])
