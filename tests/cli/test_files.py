# SPDX-License-Identifier: Apache-2.0
"""Files of users: a result, or one line that names the file; what they contain is shown as text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import PairedReport, Report, Session, encode_paired_report, encode_report
from pytest_llenergy.report.store import Journal

from ..compare.runs import record_of, report_of, scaled
from ..compare.sessions import day_of
from ..record.reports import REPORT
from .damages import DAMAGES, restore

#: The commands that read each kind of file.
COMMANDS = {
    "head.json": [
        "report head.json",
        "report head.json --format=html",
        "compare base.json head.json",
        "compare head.json base.json --format=json",
        "export head.json --format=csv",
        "merge rest.json head.json -o merged.json",
        "history add head.json --allow-dirty --at=added",
    ],
    "head.0190.journal.jsonl": [
        "report head.0190.journal.jsonl",
        "merge head.0190.journal.jsonl -o merged.json",
    ],
    "ab.json": [
        "compare ab.json",
        "export ab.json --format=csv",
        "comment ab.json --dry-run",
    ],
    ".llenergy/kept.json": ["report kept"],
    "jobs/linux/energy.json": ["comment jobs --dry-run"],
    "ENTRIES": ["history show --at=history", "compare base.json head.json --history=history"],
}

CASES = [(place, line) for place, lines in COMMANDS.items() for line in lines]

#: Commands that go on without a file that they cannot read, and what they may read of others: the records of
#: a journal before the last, and a history without some of its files.
TOLERANT = ("comment jobs", "compare base.json head.json --history")
READ = {("cut", "head.0190.journal.jsonl"), ("a directory", "ab.json")} | {
    (damage, "ENTRIES") for damage in ("missing", "empty")
}


def paired_of(base: Report, head: Report) -> PairedReport:
    session = Session(
        side="base", run_id="1", started_at="2026-01-02T03:04:05Z", finished_at=None, exit_status=0
    )
    return PairedReport(
        schema_version=REPORT.schema_version,
        tool=REPORT.tool,
        pairs="6+6",
        complete=True,
        sessions=[session],
        base=base,
        head=head,
        compared=compare_reports(base, head, ("base.json", "head.json"), [Criterion(gated=True)]),
    )


def build_project(root: Path, name: str = "t.py::a", **changes: Any) -> None:
    """Write one valid file of each kind, in which a test has this name."""

    def record(factor: float) -> Record:
        return record_of(name, scaled(factor), **changes)

    base, head = report_of(record(1.0)), report_of(record(1.2))
    paired = encode_paired_report(paired_of(base, head))
    contents = {
        "base.json": encode_report(base),
        "head.json": encode_report(head),
        "rest.json": encode_report(msgspec.structs.replace(head, records=[record_of("t.py::rest")])),
        "ab.json": paired,
        ".llenergy/kept.json": encode_report(head),
        "jobs/linux/energy.json": paired,
    }
    for place, data in contents.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(data)
    journal = Journal(root / "head.0190.journal.jsonl")
    journal.add(msgspec.structs.replace(base, records=[]))
    journal.add(base.records[0])
    journal.close(remove=False)
    for day in range(3):
        run = msgspec.structs.replace(day_of(day), records=[record(1.0)])
        (root / "day.json").write_bytes(encode_report(run))
        assert main(["history", "add", str(root / "day.json"), f"--at={root / 'history'}"]) == 0


def find(place: str) -> Path:
    return next(Path("history").glob("????????????/*")) if place == "ENTRIES" else Path(place)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    build_project(tmp_path)
    capsys.readouterr()
    return tmp_path


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_that_names_it(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place, line in CASES:
        path = find(place)
        content = path.read_bytes()
        DAMAGES[damage](path, content)
        code = main(line.split())
        out, err = capsys.readouterr()
        restore(path, content)
        assert "\x1b" not in out + err
        if code == 2:
            assert err.startswith(f"llenergy {line.split()[0]}: "), (line, err)
            assert err.count("\n") == 1, (line, err)
            assert path.name.split(".")[0] in err, (line, err)
        else:
            assert code in (0, 1), (line, code)
            assert (damage, place) in READ or line.startswith(TOLERANT), (damage, line, out)


#: Escape sequences, a direction mark, and markup.
HOSTILE = "t.py::a[\x1b[31m\u202e<img src=x onerror=alert(1)>|`\n::error::x]"


def test_what_a_file_contains_is_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build_project(tmp_path, HOSTILE)
    capsys.readouterr()
    for _, line in CASES:
        assert main(line.split()) in (0, 1), line
        text = "".join(capsys.readouterr())
        plain = text.replace("\r\n", "\n") if "=csv" in line else text
        assert not {each for each in plain if not each.isprintable() and each != "\n"}, line
        assert not any(each.startswith("::error::x") for each in text.split("\n")), line
        if "=html" in line or line.startswith("comment"):
            assert "<img" not in text, line


def test_names_in_messages_are_escaped(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "bad\x1b[31m\u202e\udcff\u2028x.json"
    (project / ".llenergy" / name).write_bytes(b"{}")
    for words in (
        ["report", name],
        ["report", ""],
        ["compare", "head.json", name],
        ["compare", "base.json", "head.json", f"--metric={name}"],
        ["merge", name, "-o", "x.json"],
        ["history", "show", f"--at={name}"],
        ["comment", name],
        ["ab", "--base", name, "--", "pytest"],
        ["run", "--meter", name, "--", "true"],
    ):
        assert main(words) == 2, words
        err = capsys.readouterr().err
        assert err.count("\n") == 1, (words, err)
        assert err.strip().isprintable(), (words, err)


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">/dev/full", 2, "llenergy report: could not write the output (No space left on device)\n"),
        ("| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written(project: Path, redirection: str, code: int, message: str) -> None:
    command = f"{sys.executable} -m pytest_llenergy.cli report head.json"
    waiting = f"(sleep 1; {command}; exit $?)" if "|" in redirection else command
    script = f"{waiting} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=project)
    assert (done.returncode, done.stderr) == (code, message)
