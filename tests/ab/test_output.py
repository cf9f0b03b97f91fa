# SPDX-License-Identifier: Apache-2.0
"""What ``llenergy ab`` writes, and where it cannot; and sides that lack tests or have other settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.report.store import read_paired_report

from .project import TESTS, Project

ONCE = ["--pairs=4", "--rounds-per-session=4"]
SAME = ["--base=HEAD", "--head=HEAD", *ONCE, "--", "pytest", "-q"]


@pytest.mark.parametrize("name", [".llenergy", ".llenergy/ab", ".llenergy/aa", ".llenergy/floors"])
def test_file_in_place_of_a_directory_is_refused_before_measuring(project: Project, name: str) -> None:
    project.write(name, "")
    message = project.error("--aa=5", *ONCE, "--", "pytest", "-q")
    assert message.startswith(f"{project.path / name}")
    assert "cannot write there (" in message
    assert project.session_logs() == []


def test_output_that_cannot_be_created_is_refused_before_measuring(project: Project) -> None:
    message = project.error("-o", "/proc/x.json", *SAME)
    assert message.startswith("--output=/proc/x.json: /proc cannot be written (")
    assert project.session_logs() == []


def test_verdicts_are_printed_if_the_output_fails_at_the_end(project: Project) -> None:
    # The tests run after the output was checked.
    project.write(
        "test_some.py",
        f"{TESTS}    Path({str(project.path / 'late.json')!r}).mkdir(exist_ok=True)\n".replace(
            "from work", "from pathlib import Path\nfrom work", 1
        ),
    )
    project.commit()
    result = project.ab("-o", "late.json", *SAME)
    assert (result.status, "1 unchanged" in result.out) == (2, True)
    (line,) = [line for line in result.lines if "late.json" in line]
    (state,) = (project.path / ".llenergy" / "ab").glob("*/")
    assert f"the measurements are kept in {state}" in line
    again = project.ab("-o", "other.json", *SAME)
    assert (again.status, "session" in again.err.replace("sessions are finished", "")) == (0, False)
    assert len(read_paired_report(project.path / "other.json").head.records[0].rounds) == 4


def test_second_comparison_does_not_replace_the_result_of_the_first(project: Project) -> None:
    place = project.path / ".llenergy" / "ab.json"
    project.write(
        "test_some.py",
        f"{TESTS}    Path({str(place)!r}).write_text('{{}}')\n".replace(
            "from work", "from pathlib import Path\nfrom work", 1
        ),
    )
    project.commit()
    result = project.ab(*SAME)
    assert result.status == 0
    assert place.read_text() == "{}"
    (other,) = place.parent.glob("ab-*.json")
    note = "another comparison has written ab.json meanwhile"
    assert f"both sides, all rounds: {other}; {note}" in result.lines
    assert read_paired_report(other).complete


def test_a_comparison_without_verdicts_does_not_replace_the_last_one(project: Project) -> None:
    assert project.ab(*SAME).status == 0
    place = project.path / ".llenergy" / "ab.json"
    before = place.read_bytes()
    project.write("test_some.py", f"{TESTS}    assert 0\n")
    project.commit()
    result = project.ab(*SAME)
    assert (result.status, place.read_bytes()) == (5, before)
    (other,) = place.parent.glob("ab-*.json")
    assert f"both sides, all rounds: {other}; without a verdict, it does not replace ab.json" in result.lines
    assert read_paired_report(other).head.records[0].status == "failed"


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_head_without_tests_has_removed_them(project: Project, how: str) -> None:
    if how == "deleted":
        (project.path / "test_some.py").unlink()
    else:
        project.write("test_some.py", "def test_unit():\n    pass\n")
    project.commit()
    words = ["--base=HEAD~", "--head=HEAD", *ONCE]
    result = project.ab(*words, "--", "pytest", "-q", "test_some.py")
    (found,) = project.paired().compared.comparisons
    assert (result.status, found.verdict) == (5, "removed")
    assert result.lines[-1] == ("llenergy ab: 1 test of the baseline removed; nothing was compared")
    assert not list(Path(project.path, ".llenergy", "ab").glob("*/inputs.json"))


def test_other_settings_of_a_side_are_noted(project: Project) -> None:
    work = (project.path / "work.py").read_text()
    project.write("work.py", f"PROCEDURE = dict(iterations=1000, warmup_iterations=5, target=0.5)\n{work}")
    project.commit()
    result = project.ab("--base=HEAD~", "--head=HEAD", *ONCE, "--", "pytest", "-q")
    line = (
        "measured with other settings: warm-up 0 iterations on base, 5 iterations on head; "
        "target 0.02 on base, 0.5 on head; iterations per round 1 on base, 1000 on head "
        "(test_some.py::test_a)"
    )
    assert line in project.paired().compared.notes
    assert line in result.out
    project.ab(*SAME)
    assert not any("settings" in note for note in project.paired().compared.notes)
