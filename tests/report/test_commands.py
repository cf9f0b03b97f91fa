# SPDX-License-Identifier: Apache-2.0
"""What the commands that read reports have in common: what they read is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report

from ..compare.runs import record_of, report_of

REPORT, ANOTHER = (encode_report(report_of(record_of())) for _ in "ab")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_bytes(REPORT)
    Path("b.json").write_bytes(ANOTHER)


WRITING = {
    "page": ["report", "a.json", "--format=html", "-o", "OUT"],
    "merge": ["merge", "b.json", "a.json", "-o", "OUT"],
    "export": ["export", "a.json", "--format=csv", "-o", "OUT"],
    "compare to head": ["compare", "b.json", "a.json", "-o", "OUT"],
    "compare to base": ["compare", "a.json", "b.json", "-o", "OUT"],
}


@pytest.mark.parametrize("output", ["./x/../a.json", "link.json", "hard.json"])
@pytest.mark.parametrize("arguments", WRITING.values(), ids=WRITING)
def test_the_input_file_is_not_overwritten(
    arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x").mkdir()
    Path("link.json").symlink_to("a.json")
    Path("hard.json").hardlink_to("a.json")
    assert main([each.replace("OUT", output) for each in arguments]) == 2
    message = capsys.readouterr().err
    assert f"{Path(output)}: the same file as the input " in message
    assert message.endswith("a.json; choose another output\n")
    assert {each.name for each in Path().iterdir()} == {"a.json", "b.json", "hard.json", "link.json", "x"}
    assert Path("link.json").is_symlink()
    assert (Path("a.json").read_bytes(), Path("b.json").read_bytes()) == (REPORT, ANOTHER)


@pytest.mark.parametrize("value", ["x" * 5000, "[/x]", "[red]", "\x1b[31m\u202e"], ids=range(4))
def test_the_table_of_a_report_shows_any_parameter(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(f"t.py::t[{value}]", params={"prompt": value})
    Path("odd.json").write_bytes(encode_report(report_of(record)))
    assert main(["report", "odd.json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 25
    shown = value.encode("unicode_escape").decode()[:10]
    # What is long is shown as pytest names it.
    name = "" if len(value) > 40 else "prompt="
    assert f"{name}{shown}" in "".join(out.split())
    assert all(each.isprintable() or each == "\n" for each in out)


def test_a_reader_that_stops_early_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "pytest_llenergy.cli", "report", "a.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "command",
    [
        ["report", "a.json", "--format=html", "-o", "."],
        ["compare", "a.json", "b.json", "-o", "."],
        ["export", "a.json", "--format=csv", "-o", "."],
        ["merge", "a.json", "-o", "."],
    ],
    ids=lambda command: str(command[0]),
)
def test_a_directory_as_output_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "--format=html" in command:
        pytest.importorskip("jinja2")
    assert main(command) == 2
    assert capsys.readouterr().err == f"llenergy {command[0]}: .: could not be written (Is a directory)\n"


def test_what_is_no_file_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """As root, a replaced /dev/null would break the machine."""
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    for output in ("pipe", "link"):
        assert main(["export", "a.json", "--format=csv", "-o", output]) == 2
        assert capsys.readouterr().err == (
            f"llenergy export: {output}: could not be written (a device, pipe or socket; name a file)\n"
        )
    assert Path("pipe").is_fifo()
    assert Path("link").is_symlink()


def test_a_link_is_followed() -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/out.csv").write_text("old")
    Path("link.csv").symlink_to("elsewhere/out.csv")
    assert main(["export", "a.json", "--format=csv", "-o", "link.csv"]) == 0
    assert Path("link.csv").is_symlink()
    assert Path("elsewhere/out.csv").read_text() != "old"
