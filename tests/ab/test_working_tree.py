# SPDX-License-Identifier: Apache-2.0
"""``--head .``: what is not committed; and what else a session may have of pytest."""

from __future__ import annotations

from pytest_llenergy.report.store import read_paired_report

from .project import Project

ONCE = ["--pairs=4", "--rounds-per-session=4"]

#: A test of the head that edits what it measures.
EDITING = """
from pathlib import Path
from work import work

def test_a(energy):
    energy(work)
    with Path("work.py").open("a") as file:
        file.write("# more")
"""

#: One that leaves a file behind, in the tree of whoever runs it.
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


def test_what_is_not_committed_is_measured(project: Project) -> None:
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.write("test_more.py", "from work import work\ndef test_c(energy): energy(work)")
    outcome = project.ab("--base=HEAD", "--head=.", *ONCE, "--", "pytest")
    assert outcome.status == 1
    assert outcome.lines[0].endswith(" (working tree)")
    paired = project.paired()
    assert {each.id: each.verdict for each in paired.compared.comparisons} == {
        "test_some.py::test_a": "regressed",
        "test_more.py::test_c": "new",
    }
    assert (paired.base.source.dirty, paired.head.source.dirty) == (False, True)
    assert (project.path / "work.py").read_text().count("11.0") == 1


def test_a_tree_that_changes_meanwhile_is_no_side(project: Project) -> None:
    project.write("test_some.py", EDITING)
    project.commit()
    outcome = project.ab("--base=HEAD", "--head=.", "--pairs=8", "--rounds-per-session=4", "--", "pytest")
    assert outcome.status == 2
    told = "the working tree has changed since the comparison began; the same command begins a new one"
    assert outcome.lines[-1].startswith(f"llenergy ab: {told} (")


def test_a_file_that_tests_leave_in_the_tree_changes_it(project: Project) -> None:
    project.write("test_some.py", LEAVING)
    project.commit()
    outcome = project.ab("--base=HEAD", "--head=.", "--pairs=8", "--rounds-per-session=4", "--", "pytest")
    assert outcome.status == 2
    assert outcome.lines[-1].endswith(" (what tests write belongs in .gitignore)")


def test_settings_of_the_project_do_not_compare_or_gate(project: Project) -> None:
    project.write(
        "pytest.ini",
        "[pytest]\naddopts = --energy-compare=base.json --energy-fail-on=energy_j:3% --energy-save=x\n",
    )
    project.commit()
    assert project.ab("--base=HEAD", "--head=HEAD", *ONCE, "--", "pytest").status == 0
    assert not list(project.path.rglob("x.json"))


def test_workers_of_xdist_leave_out_what_is_done(project: Project) -> None:
    project.write("test_some.py", TWO)
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.commit()
    outcome = project.ab("--pairs=4+4", "--rounds-per-session=4", "--", "pytest", "-p", "xdist", "-n", "1")
    assert outcome.status == 1
    rounds = {each.id.partition("::")[2]: len(each.rounds) for each in project.paired().head.records}
    assert rounds == {"test_a": 8, "test_b": 4}


def test_a_directory_below_the_top_is_the_same_below_the_checkouts(project: Project) -> None:
    project.write("below/test_below.py", "from work import work\ndef test_d(energy): energy(work)")
    project.write(
        "pytest.ini", "[pytest]\npythonpath = .\nenergy_compare = nothing\nenergy_fail_on = energy_j:3%\n"
    )
    project.commit()
    project.path = project.path / "below"
    outcome = project.ab("--base=HEAD", "--head=HEAD", *ONCE, "--", "pytest", ".")
    assert outcome.status == 0
    (found,) = read_paired_report(project.path.parent / ".llenergy" / "ab.json").compared.comparisons
    assert (found.id, found.verdict) == ("below/test_below.py::test_d", "unchanged")
