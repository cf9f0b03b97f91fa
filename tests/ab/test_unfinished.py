# SPDX-License-Identifier: Apache-2.0
"""Sessions that do not come to their end stop everything; nothing of them is lost or taken for the whole."""

from __future__ import annotations

import importlib.abc
import sys
from pathlib import Path

import pytest

from pytest_llenergy.cli import main

from .project import Outcome, Project

#: Between two tests that measure, one in which something happens on the head.
BETWEEN = """
import os
import pytest
from pathlib import Path
from work import use, work

def test_a(energy):
    energy(work)

def test_between():
    HAPPENS

def test_b(energy):
    energy(use, 5.0)
"""

#: As a disk that is full: a report is longer, what pytest prints is not.
FULL = """import resource
    if Path(os.environ["FULL"]).exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))"""


def compared(project: Project) -> Outcome:
    return project.ab("--base=main", "--pairs=4", "--rounds-per-session=2", "--", "pytest", "-q")


def on_the_head(project: Project, happens: str) -> str:
    """Something happens there. Returns what the head's first session is called."""
    project.write("test_some.py", BETWEEN.replace("HAPPENS", "pass"))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.write("test_some.py", BETWEEN.replace("HAPPENS", happens))
    return f"llenergy ab: session 2 (head {project.commit()[:7]})"


@pytest.mark.parametrize(
    ("happens", "how"),
    [
        ("os._exit(0)", "ended with exit code 0 before pytest's own end: "),
        (
            "pytest.exit('enough', returncode=0)",
            "ended with exit code 0 and was stopped before all its tests had run: ",
        ),
    ],
)
def test_one_that_exits_in_the_middle_stops_everything(project: Project, happens: str, how: str) -> None:
    told = on_the_head(project, happens)
    for _ in range(2):
        outcome = compared(project)
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.lines[-1].startswith(f"{told} {how}")
    assert "going on with a comparison that was stopped: 1 sessions are there" in outcome.lines


def test_one_that_could_not_write_its_report_is_repeated(project: Project, tmp_path: Path) -> None:
    full = tmp_path / "full"
    project.environment["FULL"] = str(full)
    told = on_the_head(project, FULL)
    full.touch()
    outcome = compared(project)
    assert outcome.status == 2
    assert outcome.lines[-1].startswith(f"{told} ended with exit code 1 before pytest's own end: ")
    full.unlink()
    assert compared(project).status == 0
    paired = project.paired()
    assert [each.verdict for each in paired.compared.comparisons] == ["unchanged", "unchanged"]
    assert [len(each.rounds) for each in paired.head.records] == [4, 4]
    assert (paired.complete, paired.compared.notes) == (True, [])


def test_a_module_that_cannot_be_imported_stops_everything(project: Project) -> None:
    told = on_the_head(project, "pass")
    project.write("test_other.py", "import nothing\n")
    project.commit()
    outcome = project.ab("--base=main", "--pairs=4", "--", "pytest", "-q", "--continue-on-collection-errors")
    assert outcome.status == 2
    assert "was stopped before all its tests had run" in outcome.lines[-1]
    assert told.partition("(")[0] in outcome.lines[-1]


class Interrupting(importlib.abc.MetaPathFinder):
    """A Ctrl-C in the middle of an import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pytest_llenergy.ab.campaign":
            raise KeyboardInterrupt


def test_an_interrupt_at_the_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pytest_llenergy.ab.campaign", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["ab", "--", "pytest"]) == 130
    assert capsys.readouterr().err.startswith("llenergy ab: interrupted; ")
