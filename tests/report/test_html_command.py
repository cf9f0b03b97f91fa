# SPDX-License-Identifier: Apache-2.0
"""The commands that write pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report
from pytest_llenergy.report.html.page import render_report
from pytest_llenergy.report.store import read_report

from ..compare.runs import LEVEL, record_of, report_of, round_of, scaled

Command = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, joules in (("base.json", LEVEL), ("head.json", scaled(1.1))):
        Path(name).write_bytes(encode_report(report_of(record_of(joules=joules))))
    return tmp_path


def test_the_command_writes_the_page_of_a_report(files: Path, capsys: Command) -> None:
    assert main(["report", "base.json", "--format=html", "-o", "energy.html"]) == 0
    assert capsys.readouterr() == ("", "")
    assert (files / "energy.html").read_text(
        "utf-8"
    ) == f"{render_report(read_report(files / 'base.json'))}\n"


def test_a_comparison_is_written_and_has_its_exit_code(files: Path, capsys: Command) -> None:
    assert main(["compare", "base.json", "head.json", "--format", "html", "-o", "out.html"]) == 1
    message = capsys.readouterr()
    assert message.out == ""
    text = (files / "out.html").read_text("utf-8")
    assert main(["compare", "base.json", "head.json", "--format=html"]) == 1
    assert capsys.readouterr().out == text
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')


def test_a_missing_extra_is_one_line(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Command) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    line = "HTML needs jinja2: pip install 'pytest-llenergy[html]'\n"
    assert main(["report", "base.json", "--format=html", "-o", "out.html"]) == 2
    assert capsys.readouterr() == ("", f"llenergy report: {line}")
    assert main(["compare", "base.json", "head.json", "--format=html"]) == 2
    assert capsys.readouterr() == ("", f"llenergy compare: {line}")
    assert not (files / "out.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(files: Path, capsys: Command) -> None:
    assert main(["report", "base.json", "--format=html", "-o", "nowhere/out.html"]) == 2
    message = "llenergy report: nowhere/out.html: could not be written (No such file or directory)\n"
    assert capsys.readouterr().err == message


def test_an_impossible_round_is_one_line(files: Path, capsys: Command) -> None:
    broken = record_of(rounds=[round_of(5.0, iterations=0)], metrics={})
    (files / "broken.json").write_bytes(encode_report(report_of(broken)))
    assert main(["report", "broken.json", "--format=html", "-o", "out.html"]) == 2
    assert capsys.readouterr().err == (
        "llenergy report: broken.json: broken report (Expected `int` >= 1 - at "
        "`$.records[0].rounds[0].iterations`)\n"
    )
