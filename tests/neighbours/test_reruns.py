# SPDX-License-Identifier: Apache-2.0
"""pytest-rerunfailures: each attempt has a record, also if an xdist worker crashed in one."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from .runs import RunSuite

RERUNS = ("rerunfailures",)

#: Counts the attempts of a test across processes.
COUNT = """
from pathlib import Path
def count(name):
    path = Path(__file__).with_name(name)
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
    return int(path.read_text())
"""

FLAKY = """
import time, pytest
from count import count
@pytest.fixture
def flaky():
    assert count("set-up") > 1
def test_flaky(energy):
    energy(time.sleep, 0.05)
    assert count("body") > 1
def test_set_up(flaky, energy):
    energy(time.sleep, 0.05)
def test_good(energy):
    energy(time.sleep, 0.05)
@pytest.mark.energy_gate(budget="0.1 J")
def test_gate(energy):
    energy(time.sleep, 0.05)
"""


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_each_attempt_has_a_record(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    plugins = (*RERUNS, "xdist") if workers else RERUNS
    ran = run_suite(
        {"count": COUNT, "test_it": FLAKY}, "--reruns=1", "--junitxml=junit.xml", *workers, plugins=plugins
    )
    ran.result.stdout.fnmatch_lines(["*1 failed, 3 passed, *3 rerun in *"])
    assert ran.statuses() == {
        ("test_flaky", 1): "failed",
        ("test_flaky", 2): "measured",
        ("test_set_up", 1): "failed",
        ("test_set_up", 2): "measured",
        ("test_good", 1): "measured",
        ("test_gate", 1): "failed",
        ("test_gate", 2): "failed",
    }
    assert ran.records()["test_gate", 2]["failed_gate"]
    # The table shows the last attempt.
    rows = [line.split()[0] for line in ran.result.outlines if line.startswith("test_") and " mJ " in line]
    assert sorted(rows) == ["test_flaky", "test_gate", "test_good", "test_set_up"]
    ran.result.stdout.fnmatch_lines(["3 earlier attempts not shown*"])
    cases = {case.get("name"): case for case in ElementTree.parse(ran.path / "junit.xml").iter("testcase")}
    names = [each.get("name") for each in cases["test_flaky"].iter("property")]
    assert names.count("llenergy.energy_j") == 1


CRASHES = """
import os, time, pytest
from count import count
def test_fails_then_dies(energy):
    attempt = count("a")
    energy(time.sleep, 0.05)
    assert attempt != 1
    if attempt == 2:
        os._exit(3)
def test_dies_twice(energy):
    energy(time.sleep, 0.05)
    if count("b") < 3:
        os._exit(3)
"""


def test_a_crashed_attempt_does_not_replace_another(run_suite: RunSuite) -> None:
    """pytest-rerunfailures does not count failures of a crashed worker."""
    ran = run_suite({"count": COUNT, "test_it": CRASHES}, "--reruns=3", "-n1", plugins=(*RERUNS, "xdist"))
    assert ran.statuses() == {
        ("test_fails_then_dies", 1): "failed",
        ("test_fails_then_dies", 2): "crashed",
        ("test_fails_then_dies", 3): "measured",
        ("test_dies_twice", 1): "crashed",
        ("test_dies_twice", 2): "crashed",
        ("test_dies_twice", 3): "measured",
    }
