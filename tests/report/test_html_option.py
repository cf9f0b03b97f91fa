# SPDX-License-Identifier: Apache-2.0
"""``--energy-html``: a run shows what it has measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report

from ..record.reports import REPORT

TEST = """
import time

def test_it(energy):
    energy(time.sleep, 0.2)
"""


def test_a_page_that_cannot_be_rendered_costs_neither_report_nor_summary(quick: pytest.Pytester) -> None:
    quick.makepyfile(TEST)
    quick.makeconftest(
        f"{Path('conftest.py').read_text()}\n"
        "from pytest_llenergy.report.html import page\n"
        "def render_report(report): raise ValueError('math domain error')\n"
        "page.render_report = render_report\n"
    )
    result = quick.runpytest_subprocess("--energy-meter=ten-watts", "--energy-report", "--energy-html")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "test_it *",
            "ERROR: energy.html was not written: rendering it raised ValueError: math domain error "
            "(conftest.py:*)",
            "energy report: energy.json",
            "*1 passed*",
        ]
    )
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert Path("energy.json").exists()


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--energy-html=page.txt", "the page's name must end in .html; did you mean page.txt.html?"),
        (
            "--energy-html=.",
            "names a test path, not a page; did you mean: pytest . --energy-html (the page's name takes an "
            "equals sign: --energy-html=energy.html)",
        ),
        ("--energy-html=test_file/page.html", "File exists"),
    ],
)
def test_an_unwritable_page_fails_before_any_test_runs(
    quick: pytest.Pytester, option: str, error: str
) -> None:
    quick.makepyfile(TEST)
    Path("test_file").touch()
    result = quick.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.stderr.lines if line.startswith("ERROR: --energy-html=")]
    assert line.endswith(error)


def test_without_the_extra_nothing_runs(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.makepyfile(TEST)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = quick.runpytest("--energy-html", "--energy-report")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.lines[0] == (
        "ERROR: --energy-html: HTML needs jinja2: pip install 'pytest-llenergy[html]'"
    )
    assert not Path("energy.json").exists()


def test_a_command_without_the_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    path, page = tmp_path / "base.json", tmp_path / "out.html"
    path.write_bytes(encode_report(REPORT))
    assert main(["report", str(path), "--format=html", "-o", str(page)]) == 2
    line = "llenergy report: HTML needs jinja2: pip install 'pytest-llenergy[html]'\n"
    assert capsys.readouterr() == ("", line)
    assert not page.exists()


def test_a_page_that_could_not_be_written_leaves_the_report(quick: pytest.Pytester) -> None:
    quick.makepyfile(TEST + "\n    import os; os.mkdir('pages/energy.html')\n")
    Path("pages").mkdir()
    result = quick.runpytest("--energy-meter=ten-watts", "--energy-report", "--energy-html=pages/energy.html")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "ERROR: *pages/energy.html: could not be written (Is a directory)",
            "energy report: energy.json",
        ]
    )
    assert Path("energy.json").exists()
