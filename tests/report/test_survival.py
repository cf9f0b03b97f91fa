# SPDX-License-Identifier: Apache-2.0
"""Finished records survive killed runs, full disks and unwritable journals."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.plugin.report_builder import ReportBuilder
from pytest_llenergy.report.store import Journal, read_report

from ..compare.runs import record_of, report_of

COMMAND = [sys.executable, "-m", "pytest", "--energy-report", "-p", "no:cacheprovider"]


def read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


#: Source of a hook that waits until two runs have begun: the later one would replace a report that it found.
BOTH_BEGIN = """
import os
from pathlib import Path

def pytest_collection_modifyitems():
    Path(f"began-{os.getpid()}").touch()
    end_s = time.monotonic() + 120
    while len(list(Path().glob("began-*"))) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_concurrent_runs_keep_separate_journals(quick: pytest.Pytester) -> None:
    conftest = quick.path / "conftest.py"
    conftest.write_text(conftest.read_text() + BOTH_BEGIN)
    quick.makepyfile("import time\ndef test_it(energy): energy(time.sleep, 0.2)")
    runs = [subprocess.Popen([*COMMAND[:-2]], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    # The report of the run that ended last is beside that of the other.
    reports = [read_json(path) for path in quick.path.glob("energy*.json")]
    assert [len(report["records"]) for report in reports] == [1, 1]
    assert len({report["run"]["id"] for report in reports}) == 2
    assert not list(quick.path.glob("*.jsonl"))


@pytest.mark.slow
def test_a_report_that_another_run_wrote_meanwhile_remains(quick: pytest.Pytester) -> None:
    quick.makepyfile("def test_it(energy): energy(sum, [1])")
    quick.runpytest("--energy-report=other.json").assert_outcomes(passed=1)
    quick.makepyfile("import shutil\ndef test_it(energy):\n    energy(sum, [1])\n    COPY")
    test = next(quick.path.glob("test_*.py"))
    test.write_text(test.read_text().replace("COPY", "shutil.copy('other.json', 'energy.json')"))
    (quick.path / "energy.json").write_text("what was there before")
    result = quick.runpytest("--energy-report")
    assert result.ret == 0
    assert read_json(quick.path / "energy.json") == read_json(quick.path / "other.json")
    (beside,) = quick.path.glob("energy.*.json")
    run = read_json(beside)["run"]["id"]
    assert beside.name == f"energy.{run}.json"
    result.stdout.fnmatch_lines(
        [f"*energy.json was written by another run meanwhile, so this run's report is {beside.name} *"]
    )
    result.stdout.fnmatch_lines([f"energy report: {beside.name}"])
    # Without another run it is replaced, as the one before was.
    test.write_text("def test_it(energy): energy(sum, [1])")
    quick.runpytest("--energy-report").stdout.fnmatch_lines(["energy report: energy.json"])


@pytest.mark.parametrize("alike", [True, False])
def test_a_journal_covers_every_host_of_the_run(tmp_path: Path, alike: bool) -> None:
    """The first line of the journal names one host; a second host makes a new header line necessary."""
    builder = ReportBuilder(tmp_path / "energy.json", tmp_path, [], datetime.now(timezone.utc))
    builder.add(record_of("t.py::here"))
    builder.describe_run()
    here = read_report(*tmp_path.glob("*.jsonl")).environment
    assert here is not None
    host = msgspec.structs.replace(here.host, name="far-away")
    key = here.key if alike else "another"
    there = msgspec.json.encode(msgspec.structs.replace(here, host=host, key=key))
    builder.add(record_of("t.py::there"), worker="gw1", environment=there)
    builder.describe_run()
    builder.add(record_of("t.py::again"))
    (journal,) = tmp_path.glob("*.jsonl")
    assert [line.startswith(b'{"schema') for line in journal.read_bytes().splitlines()] == [1, 0, 1, 0, 1, 0]
    left = read_report(journal)
    assert [record.id for record in left.records] == ["t.py::here", "t.py::there", "t.py::again"]
    names = f"{here.host.name}, far-away" if alike else None
    assert (left.environment and left.environment.host.name) == names
    report = builder.build(0, complete=True)
    assert report is not None
    assert report.environment == left.environment
    assert builder.write(report)
    assert not journal.exists()


def test_a_page_that_another_run_wrote_meanwhile_remains(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        "import pathlib\ndef test_it(energy):\n    energy(sum, [1])\n"
        "    pathlib.Path('energy.html').write_text('of another run')"
    )
    result = quick.runpytest("--energy-html", "--color=yes")
    assert result.ret == 0
    assert (quick.path / "energy.html").read_text() == "of another run"
    (beside,) = quick.path.glob("energy.*.html")
    line = f"energy: energy.html was written by another run meanwhile, so this run's page is {beside.name} *"
    result.stdout.fnmatch_lines([f"\x1b?33m{line}", f"energy page: {beside.name}"])
    result.stdout.no_fnmatch_line("*ERROR*")


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
