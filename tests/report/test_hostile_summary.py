# SPDX-License-Identifier: Apache-2.0
"""pytest's summary prints no control character of a baseline, a file, an option or a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import TEN_WATTS

pytestmark = pytest.mark.usefixtures("few_plugins", "no_xdist")

HOSTILE = "a\x1b[31m\u202e\r\n::error::\u2028b"

SUITE = "import time\ndef test_it(energy): energy(time.sleep, 0.01)\n"


def check_printable(result: pytest.RunResult) -> None:
    # capsys and pipes alike keep what a terminal would receive.
    raw = [line for line in result.outlines + result.errlines if not line.isprintable()]
    assert not raw
    assert not any(line.startswith("::error::") for line in result.outlines)


def make_baseline(pytester: pytest.Pytester, name: str) -> None:
    """Write a report of ``test_it`` and of tests with hostile names, on a machine with hostile names."""
    assert pytester.runpytest("--energy-report=plain.json").ret == 0
    tree: dict[str, Any] = json.loads(Path("plain.json").read_text())
    (record,) = tree["records"]
    tree["environment"]["host"]["cpu_model"] += HOSTILE
    tree["run"]["complete"] = False
    tree["records"] += [record | {"id": f"test_it.py::{HOSTILE}{number}"} for number in range(2)]
    Path(name).write_text(json.dumps(tree))


@pytest.mark.parametrize("options", [(), ("-q",), ("-n2",)], ids=["alone", "quiet", "-n2"])
def test_a_baseline(quick: pytest.Pytester, options: tuple[str, ...]) -> None:
    quick.makepyfile(test_it=SUITE)
    name = "b\x1b[31m\u202e.json"
    make_baseline(quick, name)
    result = quick.runpytest(f"--energy-compare={name}", "--energy-fail-on=energy_j:3%", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not comparable*"])
    result.stdout.fnmatch_lines([r"ERROR: 2 tests of b\x1b?31m\u202e.json not compared: a*"])
    check_printable(result)


def test_files_and_the_working_directory(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest refuses brackets in names of directories.
    directory = quick.mkdir("d\x1b7\u202e")
    monkeypatch.chdir(directory)
    (directory / "test_it.py").write_text(SUITE)
    (directory / "conftest.py").write_text(TEN_WATTS)
    (directory / "pytest.ini").write_text((quick.path / "tox.ini").read_text())
    options = "--energy-report=a\x1b[31mb\u202e.json", "--energy-html=a\x1b[31mb\u202e.html"
    result = quick.runpytest(*options, "--no-header")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [r"energy report: a\x1b?31mb\u202e.json", r"energy page: a\x1b?31mb\u202e.html"]
    )
    left = directory / "a\x1b[31mb\u202e.1.journal.jsonl"
    left.write_text("")
    again = quick.runpytest(*options, "--no-header")
    again.stdout.fnmatch_lines([r"journal of a killed or running run: a\x1b*"])
    nothing = quick.runpytest(*options, "--no-header", "-k", "none")
    nothing.stdout.fnmatch_lines([r"energy report: no test was measured; *d\x1b*"])
    for each in (result, again, nothing):
        # pytest itself prints the names of its own files.
        check_printable(each)
