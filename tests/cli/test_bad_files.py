# SPDX-License-Identifier: Apache-2.0
"""Files with any content: a result, or one line that names the file; never a traceback."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_llenergy.record.report import decode_lean_report, decode_paired_report
from pytest_llenergy.report.store import decode_journal

from .bad_files import (
    COMMANDS,
    FUZZ,
    TOLERANT,
    WHOLE,
    Outcome,
    build_project,
    find_place,
    run_command,
    spoiled,
)

ALL = [(kind, line) for kind, lines in COMMANDS.items() for line in lines]

#: How comparisons read a file.
DECODERS: dict[str, Callable[[bytes, str], object]] = {
    "report": decode_lean_report,
    "journal": decode_journal,
    "paired": decode_paired_report,
    "saved": decode_lean_report,
    "saved pair": decode_paired_report,
}


class Project:
    """A directory with valid files, of which one at a time is replaced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents = build_project(root)

    def run(self, kind: str, line: str, data: bytes) -> Outcome:
        """Run a command on a replaced file, and check how it ends."""
        place = find_place(self.root, kind)
        place.write_bytes(data)
        try:
            outcome = run_command(line)
        finally:
            place.write_bytes(self.contents[kind])
        assert all(each.isprintable() or each in "\r\n" for each in outcome.out + outcome.err), (
            line,
            outcome,
        )
        if outcome.code == 2:
            assert outcome.err.startswith(f"llenergy {line.split()[0]}: "), (line, outcome)
            assert outcome.err.count("\n") == 1, (line, outcome)
            assert not outcome.out, (line, outcome)
        else:
            assert outcome.code in ((0, 1, 3, 5) if line.startswith("compare") else (0,)), (line, outcome)
        return outcome


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    before = Path.cwd()
    found = Project(tmp_path_factory.mktemp("project"))
    os.chdir(found.root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield found
    os.chdir(before)


@pytest.mark.parametrize(("kind", "line"), ALL)
def test_valid_files_are_read(project: Project, kind: str, line: str) -> None:
    assert run_command(line).code in (0, 1, 5)


@pytest.mark.parametrize("content", WHOLE)
def test_what_is_no_file_of_ours_is_one_line_that_names_it(project: Project, content: str) -> None:
    for kind, line in ALL:
        outcome = project.run(kind, line, WHOLE[content])
        if not line.startswith(TOLERANT):
            assert outcome.code == 2, (line, outcome)
            assert find_place(project.root, kind).name in outcome.err, (line, outcome)


@pytest.mark.parametrize("seconds", ["0", "-1", "5e-324", "1e30"])
@pytest.mark.parametrize(("kind", "line"), [case for case in ALL if case[0] in ("report", "paired")])
def test_rounds_of_any_duration_are_a_result_or_one_line(
    project: Project, kind: str, line: str, seconds: str
) -> None:
    content = project.contents[kind].replace(b'"duration_s":2.0', f'"duration_s":{seconds}'.encode())
    assert content != project.contents[kind]
    project.run(kind, line, content)


def _fuzz(project: Project, examples: int) -> None:
    @settings(FUZZ, max_examples=examples)
    @given(st.sampled_from(ALL), st.data())
    def check(case: tuple[str, str], data: st.DataObject) -> None:
        kind, line = case
        content = data.draw(spoiled(project.contents[kind]))
        outcome = project.run(kind, line, content)
        if outcome.code not in (0, 2) and kind in DECODERS:
            # There is a verdict only on a file that can be read.
            DECODERS[kind](content, "")

    check()


def test_damaged_files_never_end_in_a_traceback(project: Project) -> None:
    _fuzz(project, 200)


@pytest.mark.slow
def test_many_damaged_files_never_end_in_a_traceback(project: Project) -> None:
    _fuzz(project, 20_000)
