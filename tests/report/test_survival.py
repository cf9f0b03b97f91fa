# SPDX-License-Identifier: Apache-2.0
"""Finished records survive killed runs, full disks and unwritable journals."""

from __future__ import annotations

import json
import resource
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_llenergy.plugin.report_builder import ReportBuilder
from pytest_llenergy.report.store import Journal, read_report

from ..compare.runs import record_of, report_of


def read_json(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(path.read_text()))


def test_a_report_that_another_run_wrote_meanwhile_remains(quick: pytest.Pytester) -> None:
    quick.makepyfile("def test_it(energy): energy(sum, [1])")
    quick.runpytest("--energy-report=other.json").assert_outcomes(passed=1)
    quick.makepyfile("import shutil\ndef test_it(energy):\n    energy(sum, [1])\n    COPY")
    test = next(quick.path.glob("test_*.py"))
    test.write_text(test.read_text().replace("COPY", "shutil.copyfile('other.json', 'energy.json')"))
    (quick.path / "energy.json").write_text("what was there before")
    result = quick.runpytest("--energy-report")
    assert result.ret == 0
    assert read_json(quick.path / "energy.json") == read_json(quick.path / "other.json")
    (beside,) = quick.path.glob("energy.*.json")
    assert beside.name == f"energy.{read_json(beside)['run']['id']}.json"
    result.stdout.fnmatch_lines([f"energy report: {beside.name}"])
    # Without another run it is replaced, as the one before was.
    test.write_text("def test_it(energy): energy(sum, [1])")
    quick.runpytest("--energy-report").stdout.fnmatch_lines(["energy report: energy.json"])


def test_the_journal_names_the_machine_once_it_is_known(tmp_path: Path) -> None:
    builder = ReportBuilder([tmp_path / "energy.json"], tmp_path, [], datetime.now(timezone.utc))
    builder.add(record_of("t.py::one"))
    builder.describe_run()
    builder.add(record_of("t.py::two"))
    builder.describe_run()
    (journal,) = tmp_path.glob("*.jsonl")
    assert [line.startswith(b'{"schema') for line in journal.read_bytes().splitlines()] == [1, 0, 1, 0]
    left = read_report(journal)
    assert [record.id for record in left.records] == ["t.py::one", "t.py::two"]
    report = builder.build(0, complete=True)
    assert left.environment is not None
    assert report.environment == left.environment
    assert builder.write(report)
    assert not journal.exists()


def test_records_after_those_that_a_full_disk_refused_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "r.x.journal.jsonl")
    journal.add(report_of())
    journal.add(record_of("t.py::test_0"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 100, limits[1]))
    try:
        for name in ("t.py::test_1", "t.py::test_2"):
            with pytest.raises(OSError, match="too large"):
                journal.add(record_of(name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.add(record_of("t.py::test_3"))
    journal.close(remove=False)
    assert [each.id for each in read_report(journal.path).records] == ["t.py::test_0", "t.py::test_3"]
