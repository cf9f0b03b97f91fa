# SPDX-License-Identifier: Apache-2.0
"""Failures in sessions are noted, and a budget that only the head exceeds fails the comparison."""

from __future__ import annotations

from pytest_llenergy.ab.campaign import FailureCounts

from .project import Project, Result

GATED = """
import pytest
from work import work

@pytest.mark.energy_gate(budget="BUDGET J")
def test_a(energy):
    energy(work)

def test_plain():
    assert FINE
"""


def compared(project: Project, budgets: tuple[str, str], *, fine: bool = True) -> Result:
    project.write("test_some.py", GATED.replace("BUDGET", budgets[0]).replace("FINE", "True"))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.write("test_some.py", GATED.replace("BUDGET", budgets[1]).replace("FINE", str(fine)))
    project.commit()
    return project.ab("--base=main", "--pairs=4", "--rounds-per-session=4", "--", "pytest", "-q")


def test_budget_that_only_the_head_exceeds_fails_the_comparison(project: Project) -> None:
    result = compared(project, ("11", "9"))
    assert result.status == 1
    assert result.lines[-1] == "llenergy ab: over budget on the head: test_some.py::test_a"
    paired = project.paired()
    assert [each.verdict for each in paired.compared.comparisons] == ["unchanged"]
    first, second = paired.compared.notes
    assert first == "head: failed in sessions: test_some.py::test_a (1 of 1)"
    assert second.startswith(
        "head: test_some.py::test_a is over its budget only on head (1 of 1 sessions: Failed: energy_"
    )


def test_budget_that_both_sides_exceed_is_noted(project: Project) -> None:
    assert compared(project, ("9", "9")).status == 0
    message = "failed in sessions: test_some.py::test_a (1 of 1)"
    assert project.paired().compared.notes == [f"base: {message}", f"head: {message}"]


def test_failure_of_a_test_without_energy_is_noted(project: Project) -> None:
    assert compared(project, ("11", "11"), fine=False).status == 0
    (note,) = project.paired().compared.notes
    assert note == "head: failed in sessions: test_some.py::test_plain (1 of 1)"


def test_many_failures_are_one_line() -> None:
    failed = FailureCounts()
    failed.add([f"t{number}" for number in range(7)])
    assert failed.note("base") == (
        "base: failed in sessions: t0 (1 of 1), t1 (1 of 1), t2 (1 of 1), t3 (1 of 1), t4 (1 of 1) and 2 more"
    )
