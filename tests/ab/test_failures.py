# SPDX-License-Identifier: Apache-2.0
"""Budgets and tests that fail in sessions are told, and a budget that the head alone breaks is red."""

from __future__ import annotations

from pytest_llenergy.ab.campaign import FailureCounts

from .project import Outcome, Project

GATED = """
import pytest
from work import work

@pytest.mark.energy_gate(budget="BUDGET J")
def test_a(energy):
    energy(work)

def test_plain():
    assert FINE
"""


def compared(project: Project, budgets: tuple[str, str], *, fine: bool = True) -> Outcome:
    project.write("test_some.py", GATED.replace("BUDGET", budgets[0]).replace("FINE", "True"))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.write("test_some.py", GATED.replace("BUDGET", budgets[1]).replace("FINE", str(fine)))
    project.commit()
    return project.ab("--base=main", "--pairs=4", "--rounds-per-session=2", "--", "pytest", "-q")


def test_a_budget_that_the_head_alone_breaks_is_red(project: Project) -> None:
    outcome = compared(project, ("11", "9"))
    assert outcome.status == 1
    assert outcome.lines[-1] == "llenergy ab: over budget on the head alone: test_some.py::test_a"
    paired = project.paired()
    assert [each.verdict for each in paired.compared.comparisons] == ["unchanged"]
    first, second = paired.compared.notes
    assert first == "head: failed in sessions: test_some.py::test_a (2 of 2)"
    assert second.startswith(
        "head: test_some.py::test_a is over its budget, which base is not (2 of 2 sessions: Failed: energy_"
    )


def test_a_budget_that_both_sides_break_is_told(project: Project) -> None:
    assert compared(project, ("9", "9")).status == 0
    told = "failed in sessions: test_some.py::test_a (2 of 2)"
    assert project.paired().compared.notes == [f"base: {told}", f"head: {told}"]


def test_a_plain_test_that_fails_is_told(project: Project) -> None:
    assert compared(project, ("11", "11"), fine=False).status == 0
    (note,) = project.paired().compared.notes
    assert note == "head: failed in sessions: test_some.py::test_plain (2 of 2)"


def test_many_failures_are_one_line() -> None:
    failed = FailureCounts()
    failed.add([f"t{number}" for number in range(7)])
    assert failed.line("base") == (
        "base: failed in sessions: t0 (1 of 1), t1 (1 of 1), t2 (1 of 1), t3 (1 of 1), t4 (1 of 1) and 2 more"
    )
