# SPDX-License-Identifier: Apache-2.0
"""Names of tests are unique in every table, and as short as that allows."""

from __future__ import annotations

from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Flag, Record
from pytest_llenergy.report.names import unique_function_names
from pytest_llenergy.report.terminal import render_summary
from pytest_llenergy.report.verdicts import render_verdicts

from ..compare.runs import record_of

BUSY = Flag(name="contended", severity="warning", detail="others used 0.30 cores")

#: Two classes in two files, and one that stands alone.
ALIKE = ["a/test_x.py::TestA::test_m", "a/test_x.py::TestB::test_m", "b/test_x.py::TestA::test_m"]
NAMES = ["a/test_x.py::TestA::test_m", "TestB::test_m", "b/test_x.py::TestA::test_m", "test_n[a::test_m]"]


def records() -> list[Record]:
    return [
        record_of(each, params={}, ranks=[], flags=[BUSY])
        for each in [*ALIKE, "test_x.py::test_n[a::test_m]"]
    ]


def test_functions_with_one_name_get_their_class_or_file() -> None:
    ids = [
        "t.py::test_n[a::test_m]",
        *ALIKE,
        "d/t.py::test_o",
        "e/t.py::test_o",
        "t.py::TestA::test_n2[1]",
        "doc.rst",
    ]
    assert list(unique_function_names([*ids, *ids]).values()) == [
        "test_n",
        *NAMES[:3],
        "d/t.py::test_o",
        "e/t.py::test_o",
        "test_n2",
        "doc.rst",
    ]


def test_the_summary_shows_unique_names() -> None:
    lines = render_summary(records(), 200, color=False).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [*NAMES[:3], "test_n"]
    assert "contended: a/test_x.py::TestA::test_m and 3 more: others used 0.30 cores" in lines


def test_comparisons_show_unique_names() -> None:
    found = [
        Comparison(
            id=each.id, metric="energy_j", unit="J", verdict="unchanged", reason="", base=1.0, head=1.0
        )
        for each in records()
    ]
    rows = render_verdicts(found, 200, color=False).splitlines()
    assert [line.split()[0] for line in rows if " unchanged " in line] == NAMES
