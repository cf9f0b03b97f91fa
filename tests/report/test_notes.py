# SPDX-License-Identifier: Apache-2.0
"""Notes below the table of the summary: few, the most important first, and none twice."""

from __future__ import annotations

import pytest

from pytest_llenergy.model.record import Flag, Record
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


def test_at_most_three_lines_of_notes_follow_the_table() -> None:
    drift, late = warning("drift"), warning("late-reader", "12 ms")
    outlier = warning("outlying-rounds", "round 3 took 11.1 s, the median round 280 ms")
    wrong = Flag(name="spoiled", severity="invalid", detail="a counter ran backwards")
    records = [noted(1, drift, late, outlier), noted(2, drift, wrong)]
    lines = below(shown(*records))
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    # The most important first: two causes are left for -v.
    assert lines[0] == "spoiled: test_2: a counter ran backwards"
    assert lines[1] == "outlying-rounds: test_1: round 3 took 11.1 s, the median round 280 ms"
    assert lines[2].startswith("drift: test_1 and 1 more: xxx")
    assert lines[2].endswith("x… (+2: -v)")
    text = " ".join(shown(*records, verbosity=1))
    assert "late-reader: test_1: 12 ms u: standard uncertainty (k=1)" in text
    assert "-v)" not in text


def test_a_note_that_is_cut_says_how_to_read_it() -> None:
    assert below(shown(noted(1, warning("drift"))))[-1].endswith(" (-v)")
    assert below(shown(noted(1, warning("drift", "short"))))[-2:] == [
        "drift: test_1: short",
        "u: standard uncertainty (k=1), accuracy of the source included",
    ]


@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_a_saturated_load_achieved_is_never_cut(others: int) -> None:
    detail = (
        "1 of 1 rounds: achieved 6.7 of 20 requests/s; time to first token 0.51 s in the first third, 2.7 s "
        "in the last, and up to 21 requests in flight; lower the rate"
    )
    further = [noted(number + 2, warning(f"other-{number}", "x" * 100)) for number in range(others)]
    lines = below(shown(noted(1, warning("saturated", detail)), *further))
    text = " ".join(lines)
    assert f"saturated: test_1: {detail}" in text
    assert text.count("x…") == min(others, 2)
    assert text.endswith({0: "accuracy of the source included", 1: "included (-v)", 3: "(+2: -v)"}[others])
    assert max(map(len, lines)) <= 80


def test_different_details_of_a_flag_are_not_shown_as_one() -> None:
    error = [Flag(name="unfinished", severity="invalid", detail=f"the work failed: {each}") for each in "abb"]
    lines = below(shown(*[noted(number, flag) for number, flag in enumerate(error)], width=100))
    assert lines[0] == "unfinished: 3 tests, such as test_0: the work failed: a"
    lines = below(shown(*[noted(number, flag) for number, flag in enumerate(error[1:])], width=100))
    assert lines[0] == "unfinished: test_0 and 1 more: the work failed: b"


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_no_line_repeats_another(verbosity: int) -> None:
    shared = Flag(name="unread-meter", severity="note", detail="rapl: no package counter")
    contended = warning("contended", "other processes used 2.00 cores")
    summary = warning("contended", "2 of 2 rounds: other processes used 2.00 cores")
    rounds = [round_of(10.0, flags=[contended]), round_of(10.1, flags=[contended])]
    records = [
        record_of(f"t.py::test_{number}", params={}, rounds=rounds, flags=[summary, shared])
        for number in (1, 2)
    ]
    text = " ".join(render_summary(records, 200, color=False, verbosity=verbosity).split())
    assert text.count("rapl: no package counter") == 1
    # With -vv, once for the rounds of each test.
    assert text.count("other processes used 2.00 cores") == (2 if verbosity == 2 else 1)
    if verbosity == 2:
        assert text.count("rounds 1, 2: contended (warning)") == 2
