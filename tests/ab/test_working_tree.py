# SPDX-License-Identifier: Apache-2.0
"""``--head .`` measures the working tree; and other settings of pytest that sessions meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.report.store import read_paired_report

from .project import Project

ONCE = ["--pairs=4", "--rounds-per-session=4"]

#: A test that edits the code that it measures.
EDITING = """
from pathlib import Path
from work import work

def test_a(energy):
    energy(work)
    with Path("work.py").open("a") as file:
        file.write("# more")
"""

#: A test that leaves a file in the working tree.
LEAVING = """
from pathlib import Path
from work import work

def test_a(energy):
    energy(work)
    Path("left.json").write_text("{}")
"""

TWO = """
from work import use, work

def test_a(energy):
    energy(work)

def test_b(energy):
    energy(use, 5.0)
"""


def test_uncommitted_changes_are_measured(project: Project) -> None:
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.write("test_more.py", "from work import work\ndef test_c(energy): energy(work)")
    result = project.ab("--base=HEAD", "--head=.", *ONCE, "--", "pytest")
    assert result.status == 1
    assert result.lines[0].endswith(" (working tree)")
    paired = project.paired()
    assert {each.id: each.verdict for each in paired.compared.comparisons} == {
        "test_some.py::test_a": "regressed",
        "test_more.py::test_c": "new",
    }
    assert (paired.base.source.dirty, paired.head.source.dirty) == (False, True)
    assert (project.path / "work.py").read_text().count("11.0") == 1


def test_working_tree_that_changes_is_refused(project: Project) -> None:
    project.write("test_some.py", EDITING)
    project.commit()
    result = project.ab("--base=HEAD", "--head=.", "--pairs=8", "--rounds-per-session=4", "--", "pytest")
    assert result.status == 2
    message = "the working tree has changed since the comparison began; the same command starts a new one"
    assert result.lines[-1].startswith(f"llenergy ab: {message} (")


def test_file_that_tests_leave_changes_the_working_tree(project: Project) -> None:
    project.write("test_some.py", LEAVING)
    project.commit()
    result = project.ab("--base=HEAD", "--head=.", "--pairs=8", "--rounds-per-session=4", "--", "pytest")
    assert result.status == 2
    assert result.lines[-1].endswith(" (add files that tests write to .gitignore)")


def test_gates_in_project_settings_are_ignored(project: Project) -> None:
    project.write(
        "pytest.ini",
        "[pytest]\naddopts = --energy-compare=base.json --energy-fail-on=energy_j:3% --energy-save=x\n",
    )
    project.commit()
    assert project.ab("--base=HEAD", "--head=HEAD", *ONCE, "--", "pytest").status == 0
    assert not list(project.path.rglob("x.json"))


@pytest.mark.slow
def test_xdist_workers_skip_finished_tests(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("test_some.py", TWO)
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.commit()
    result = project.ab("--pairs=4+4", "--rounds-per-session=4", "--", "pytest", "-p", "xdist", "-n", "1")
    assert result.status == 1
    rounds = {each.id.partition("::")[2]: len(each.rounds) for each in project.paired().head.records}
    assert rounds == {"test_a": 8, "test_b": 4}


def test_subdirectory_is_entered_in_each_checkout(project: Project) -> None:
    project.write("below/test_below.py", "from work import work\ndef test_d(energy): energy(work)")
    project.write(
        "pytest.ini", "[pytest]\npythonpath = .\nenergy_compare = nothing\nenergy_fail_on = energy_j:3%\n"
    )
    project.commit()
    project.path = project.path / "below"
    result = project.ab("--base=HEAD", "--head=HEAD", *ONCE, "--", "pytest", ".")
    assert result.status == 0
    (found,) = read_paired_report(project.path.parent / ".llenergy" / "ab.json").compared.comparisons
    assert (found.id, found.verdict) == ("below/test_below.py::test_d", "unchanged")
