# SPDX-License-Identifier: Apache-2.0
"""``llenergy compare``: output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.compare import FORMATS
from pytest_llenergy.record.comparison import AppliedRule, Comparison
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, encode_paired_report, encode_report
from pytest_llenergy.report.store import Journal

from ..record.test_paired import PAIRED
from .runs import LEVEL, TEST, UNSURE, record_of, report_of, round_of, scaled

Compare = Callable[..., tuple[int, str, str]]

WORSE = record_of(joules=scaled(1.1))


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Compare two reports, or what is written instead of them. Gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(base: Report | bytes, head: Report | bytes, *options: str) -> tuple[int, str, str]:
        for name, content in (("base.json", base), ("head.json", head)):
            Path(name).write_bytes(encode_report(content) if isinstance(content, Report) else content)
        try:
            status = main(["compare", "base.json", "head.json", *options])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        message = capsys.readouterr()
        return status, message.out, message.err

    return run


def of(*records: Record) -> Report:
    return report_of(*records)


def test_table_fits_any_id_and_escapes_invisible_characters(compare: Compare) -> None:
    name = f"a/t.py::t[\x1b[31m\u202e{'x' * 5000}z]"
    _, out, _ = compare(of(record_of(name)), of(record_of(name, scaled(1.1))))
    assert len(out.splitlines()) < 25
    assert "t[\\x1b[31m\\u202exx" in out
    _, out, _ = compare(
        of(record_of(name)), of(Record(id=name, attempt=1, status="failed", reason="\x1b[2J"))
    )
    joined = "".join(line.strip() for line in out.splitlines())
    (line,) = [line for line in joined.split("invalid:") if line.startswith("t.py")]
    assert "xz]: " in line
    assert all(each.isprintable() or each == "\n" for each in out)


VAGUE = record_of(joules=UNSURE)


def test_inconclusive_verdicts_give_a_warning(compare: Compare) -> None:
    said = "warning, 1 of 1 test inconclusive, a quieter machine or more rounds can decide"
    assert compare(of(VAGUE), of(VAGUE))[2] == f"llenergy compare: {said}\n"
    passed = "llenergy compare: pass, 1 of 1 test inconclusive\n"
    assert compare(of(VAGUE), of(VAGUE), "--inconclusive=pass")[2] == passed


@pytest.mark.parametrize(
    ("factor", "rounds", "remedy"),
    [
        (1.04, 12, "llenergy ab can decide"),
        (1.04, 48, "llenergy ab can decide"),
        (1.02, 48, "llenergy ab can decide"),
        (1 / 1.04, 48, None),
    ],
)
def test_a_warning_names_what_can_decide(
    compare: Compare, factor: float, rounds: int, remedy: str | None
) -> None:
    """More rounds do not help if the limits are wide because sessions differ by 1.5 %."""
    base, head = (of(record_of(joules=scaled(by) * (rounds // 6))) for by in (1.0, factor))
    warning = f"llenergy compare: warning, 1 of 1 test inconclusive, {remedy}\n" if remedy else ""
    assert compare(base, head)[2] == warning


def test_a_warning_does_not_ask_for_rounds_that_the_meters_cannot_use(compare: Compare) -> None:
    rounds = [round_of(1.5 * each) for each in LEVEL]
    rounds[3] = round_of(15.0, 9.2e18)
    status, out, err = compare(of(record_of()), of(record_of(rounds=rounds)), "--metric=energy_j")
    assert (status, err.split(", ")[2]) == (0, "the meters cannot resolve smaller changes\n")
    out = " ".join(out.split())
    assert "regressed by less than can be resolved (1000.0%); 6 rounds; " in out


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (
            "--metric=joules",
            "unknown metric 'joules'; the nearest names are ",
        ),
        (
            "--metric=peak_memory_bytes",
            "peak_memory_bytes has one value per test and cannot be compared; ",
        ),
        ("--inconclusive=maybe", "--inconclusive=maybe: must be warn, fail or pass"),
        ("--format=xml", "invalid choice: 'xml'"),
    ],
)
def test_usage_error_exits_with_two(compare: Compare, option: str, error: str) -> None:
    status, out, err = compare(of(record_of()), of(record_of()), option)
    assert (status, out) == (2, "")
    assert error in err


def test_journal_of_a_killed_run_can_be_compared(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(of(record_of()), of(WORSE))
    journal = Journal(Path("head.x.journal.jsonl"))
    journal.add(report_of(complete=False))
    journal.add(WORSE)
    journal.close(remove=False)
    assert main(["compare", "base.json", "head.x.journal.jsonl"]) == 1
    assert "head.x.journal.jsonl is from a run that did not finish" in capsys.readouterr().out


def test_gates_of_marks_are_named(compare: Compare) -> None:
    rule = AppliedRule(threshold=0.03, threshold_absolute=0.0, floor=0.0, tolerance=0.03, alpha=0.01)
    mark = Comparison(
        id=TEST, metric="mean_power_w", unit="W", verdict="new", reason="", gated=True, rule=rule
    )
    marked = of(record_of(comparisons=[mark]))
    note = "the gate of 1 test on mean_power_w is not checked here; add --fail-on=mean_power_w:3%"
    assert note in compare(of(record_of()), marked)[1]
    assert note not in compare(of(record_of()), marked, "--fail-on=mean_power_w:3%")[1]
    assert note in compare(marked, of(record_of()))[1], "the head has dropped the mark"


@pytest.mark.parametrize("form", [*FORMATS, "comment"])
@pytest.mark.slow
def test_output_that_the_encoding_lacks_is_no_error(compare: Compare, tmp_path: Path, form: str) -> None:
    named = record_of("test_ł")
    compare(of(named), of(named))
    (tmp_path / "ab.json").write_bytes(encode_paired_report(PAIRED))
    if form == "comment":
        words = ["comment", "--dry-run", "ab.json"]
    else:
        words = ["compare", "base.json", "head.json", "--format", form]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_llenergy.cli", *words],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    if form == "json":
        assert "test_ł" in json.loads(done.stdout)["comparisons"][0]["id"]
