# SPDX-License-Identifier: Apache-2.0
"""Notes below the table of the summary: few, the most important first, and none twice."""

from __future__ import annotations

import pytest

from pytest_llenergy.record.record import Flag, Record
from pytest_llenergy.report.terminal import render_summary

from ..compare.runs import record_of, round_of
from .test_terminal import shown


def noted(number: int, *flags: Flag) -> Record:
    return record_of(f"t.py::test_{number}", params={}, flags=list(flags))


def warning(name: str, detail: str = "x" * 100) -> Flag:
    return Flag(name=name, severity="warning", detail=detail)


def below(lines: list[str]) -> list[str]:
    """Return the lines below the rows of the table."""
    last = max(number for number, line in enumerate(lines) if line.startswith("test_") and " ± " in line)
    return lines[last + 1 :]


def test_at_most_six_notes_follow_the_table() -> None:
    flags = [warning(name, f"why {name} {'x ' * 100} what to do") for name in "abcdef"]
    wrong = Flag(name="spoiled", severity="invalid", detail="a counter ran backwards")
    records = [noted(1, *flags, warning("uneven-rounds", "round 3")), noted(2, flags[0], wrong)]
    lines = below(shown(*records))
    assert max(map(len, lines)) <= 80
    # The most important first, and each in full.
    assert lines[:3] == [
        "spoiled: test_2: a counter ran backwards",
        "gpu energy measured by nvml; all rows share one error of scale (within 5%)",
        "uneven-rounds: test_1: round 3",
    ]
    assert lines[3].startswith("a: test_1 and 1 more: why a x x")
    assert lines[5].endswith("x what to do")
    assert lines[-1] == "more notes: 3 (-v)"
    assert len(lines) == 3 + 3 * 3 + 1
    text = " ".join(shown(*records, verbose=True))
    assert "f: test_1: why f x x" in text
    assert "(-v)" not in text


def test_what_a_saturated_load_achieved_is_never_cut() -> None:
    detail = (
        "1 of 1 rounds: achieved 6.7 of 20 requests/s; time to first token 0.51 s in the first third, 2.7 s "
        "in the last, and up to 21 requests in flight; lower the rate"
    )
    assert f"saturated: test_1: {detail}" in " ".join(below(shown(noted(1, warning("saturated", detail)))))


def test_different_details_of_a_flag_are_not_shown_as_one() -> None:
    error = [Flag(name="unfinished", severity="invalid", detail=f"the work failed: {each}") for each in "abb"]
    lines = below(shown(*[noted(number, flag) for number, flag in enumerate(error)], width=100))
    assert lines[0] == "unfinished: 3 tests, such as test_0: the work failed: a"
    lines = below(shown(*[noted(number, flag) for number, flag in enumerate(error[1:])], width=100))
    assert lines[0] == "unfinished: test_0 and 1 more: the work failed: b"


@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_repeats_another(verbose: bool) -> None:
    contended = warning("contended", "other processes used 2.00 cores")
    summary = warning("contended", "2 of 2 rounds: other processes used 2.00 cores")
    rounds = [round_of(10.0, flags=[contended]), round_of(10.1, flags=[contended])]
    records = [
        record_of(f"t.py::test_{number}", params={}, rounds=rounds, flags=[summary]) for number in (1, 2)
    ]
    text = " ".join(render_summary(records, 200, color=False, verbose=verbose).split())
    assert text.count("other processes used 2.00 cores") == 1
