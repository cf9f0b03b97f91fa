# SPDX-License-Identifier: Apache-2.0
"""Reports kept under a name: where they are found, and what a wrong name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report

from ..compare.runs import record_of, report_of, scaled

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two saved reports in the root directory, as seen from a directory below it."""
    kept, below = tmp_path / ".llenergy", tmp_path / "a" / "b"
    kept.mkdir()
    below.mkdir(parents=True)
    (kept / "main.json").write_bytes(encode_report(report_of(record_of())))
    (kept / "slower.json").write_bytes(encode_report(report_of(record_of(joules=scaled(2)))))
    monkeypatch.chdir(below)
    return kept


def test_names_of_saved_reports_are_compared(capsys: Output) -> None:
    assert main(["compare", "main", "slower"]) == 1
    assert "regressed" in capsys.readouterr().out
    assert main(["compare", "slower", "../../.llenergy/main.json"]) == 0


@pytest.mark.parametrize("command", [["report", "main"], ["export", "main", "--format=csv"]], ids=str)
def test_other_commands_take_names_too(command: list[str], capsys: Output) -> None:
    assert main(command) == 0
    assert "test_decode" in capsys.readouterr().out


def test_a_file_without_suffix_is_a_file(capsys: Output) -> None:
    Path("main").write_bytes(encode_report(report_of(record_of(joules=scaled(2)))))
    assert main(["compare", "../../.llenergy/main.json", "main"]) == 1


def test_an_input_by_name_is_not_overwritten(kept: Path, capsys: Output) -> None:
    before = (kept / "main.json").read_bytes()
    assert main(["compare", "main", "slower", "-o", str(kept / "main.json")]) == 2
    assert "the same file as the input" in capsys.readouterr().err
    assert (kept / "main.json").read_bytes() == before
