# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows at 80 columns: every value, whole, and nothing too wide."""

from __future__ import annotations

import html
import json
import re

import pytest

from .project import Outcome, Project, too_long

SUITE = """
import time
import pytest

@pytest.mark.parametrize("request_rate", [1.0, 20.0])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_with_a_rather_long_name(energy, batch_size, request_rate):
    energy(time.sleep, 0.05 + batch_size / 100)

def test_window(energy_meter):
    with energy_meter("load"):
        time.sleep(0.3)

@pytest.mark.gpus(2, fallback="cpu")
def test_fallback(energy_meter):
    with energy_meter("w"):
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def ran(module_project: Project) -> tuple[Project, Outcome]:
    module_project.write("test_some.py", SUITE)
    return module_project, module_project.pytest("--energy-report", module_project.meter())


def summary(outcome: Outcome) -> list[str]:
    """Return the lines from the heading of the summary on."""
    start = next(n for n, line in enumerate(outcome.lines) if re.fullmatch("=+ energy =+", line))
    return outcome.lines[start:]


def energies(lines: list[str]) -> list[float]:
    """Return the joules of the rows of a table."""
    found = [re.search(r"(\d+(?:\.\d+)?) ± [\d.]+ (mJ|J)", line) for line in lines if "·" not in line]
    return [float(each[1]) / {"J": 1, "mJ": 1000}[each[2]] for each in found if each is not None]


def test_each_test_is_there_with_name_parameters_energy_and_uncertainty(
    ran: tuple[Project, Outcome],
) -> None:
    project, outcome = ran
    assert not list(too_long(summary(outcome)))
    shown = "\n".join(summary(outcome))
    assert "test_with_a_rather_long_name" in shown
    for parameter in ("batch_size", "request_rate"):
        assert parameter in shown
    for value in ("20.0", "1.0"):
        assert re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", shown)
    # Four tests with an energy, and each value is that of the report.
    values = energies(summary(outcome))
    for name, record in project.records().items():
        if name.startswith("test_with"):
            energy_j = record["metrics"]["energy_j"]["value"]
            assert any(value == pytest.approx(energy_j, rel=0.06) for value in values), (name, values)
    # So are windows, fallbacks and the path of the report.
    assert re.search(r"load.*(J|no )", shown)
    assert re.search(r"fallback.*CPU", shown)
    assert "energy.json" in shown


def test_no_table_if_quiet_or_without_anything_measured(ran: tuple[Project, Outcome]) -> None:
    quiet = ran[0].pytest("-q", "--energy-report=q.json", "-k", "window", ran[0].meter())
    assert "±" not in quiet.out
    assert "q.json" in quiet.out
    assert ran[0].exists("q.json")
    ran[0].write("plain/test_plain.py", "def test_it(): pass\n")
    shown = ran[0].pytest("plain").out
    assert not re.search("=+ energy|±|joule", shown)


def test_verbose_shows_rounds_and_where_the_time_went(ran: tuple[Project, Outcome]) -> None:
    shown = ran[0].llenergy("report", "energy.json", "-v")
    assert shown.ret == 0
    assert len(shown.lines) > len(ran[0].llenergy("report", "energy.json").lines) + 8
    assert "warm-up" in shown.out


def test_the_report_command_prints_the_same_table(ran: tuple[Project, Outcome]) -> None:
    project, outcome = ran
    printed = project.llenergy("report", "energy.json")
    shown = summary(outcome)
    assert not list(too_long(printed.lines))
    assert [line for line in printed.lines if "±" in line] == [line for line in shown if "±" in line]


def test_columns_can_be_chosen(ran: tuple[Project, Outcome]) -> None:
    shown = ran[0].llenergy("report", "energy.json", "--columns=duration_s,mean_power_w,rounds")
    assert shown.ret == 0
    assert not list(too_long(shown.lines))
    for pattern in (r"\bm?s\b", r"\bW\b", r"\b2\b"):
        assert re.search(pattern, shown.out), pattern


def test_markdown_is_a_table(ran: tuple[Project, Outcome]) -> None:
    shown = ran[0].llenergy("report", "energy.json", "--format=markdown")
    rows = [line for line in shown.lines if line.startswith("|")]
    assert len(rows) >= 2 + 4
    assert len({line.replace("\\|", "").count("|") for line in rows[:3]}) == 1
    assert sum("±" in html.unescape(row) for row in rows) >= 4


def test_failed_tests_are_listed(ran: tuple[Project, Outcome]) -> None:
    ran[0].write("fail/test_f.py", "def test_gone(energy):\n    raise ValueError('no such layer')\n")
    ran[0].pytest("fail", "--energy-report=failed.json", ran[0].meter()).check(failed=1)
    shown = ran[0].llenergy("report", "failed.json")
    assert "test_gone" in shown.out


def test_hostile_names_do_not_reach_the_terminal(ran: tuple[Project, Outcome]) -> None:
    """Reports come from others: control characters would rewrite what the terminal shows."""
    report = ran[0].report()
    for record in report["records"]:
        record["id"] = "test_x.py::test_\x1b[2Jwiped\u202e"
    ran[0].write("hostile.json", json.dumps(report))
    shown = ran[0].llenergy("report", "hostile.json")
    assert "\x1b" not in shown.out
    assert "\u202e" not in shown.out
