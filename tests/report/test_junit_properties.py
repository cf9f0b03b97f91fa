# SPDX-License-Identifier: Apache-2.0
"""Metrics are properties of the test case in JUnit XML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import junitparser
import pytest

from pytest_llenergy.energy import attribution
from pytest_llenergy.energy.cpu_time import CpuTime

SUITE = """
import time, pytest
def test_passes(energy, record_property):
    record_property("own", 1)
    energy(time.sleep, 0.05)
def test_fails(energy):
    assert energy(time.sleep, 0.05).energy_j < 0
@pytest.mark.energy_gate(metric="energy_j", budget="1 mJ")
def test_over_budget(energy):
    energy(time.sleep, 0.05)
def test_window(energy_meter):
    with energy_meter("load"):
        time.sleep(0.05)
def test_other():
    pass
"""


def properties(pytester: pytest.Pytester, name: str) -> dict[str, str]:
    """Return the properties of one test; fail if a name is there twice."""
    document = junitparser.JUnitXml.fromfile(str(pytester.path / "junit.xml"))
    (case,) = (case for suite in document for case in suite if case.name == name)
    found = case.child(junitparser.Properties)
    values = [(each.name, each.value) for each in found] if found is not None else []
    assert len(dict(values)) == len(values)
    return dict(values)


def test_the_kind_says_that_joules_are_attributed(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attribution, "read_cpu_time", lambda: CpuTime(time.process_time() + 3 * time.monotonic(), 0.0)
    )
    conftest = quick.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace('scope="test"', 'scope="test", cpu_ratio=1.5'))
    quick.makepyfile(SUITE)
    quick.runpytest_inprocess("--junitxml=junit.xml", "-o", "junit_family=xunit1", "-k", "passes or window")
    for name in ("test_passes", "test_window"):
        assert properties(quick, name)["llenergy.kind"] == "attributed"


def test_a_rerun_leaves_the_properties_of_its_last_attempt(
    quick: pytest.Pytester, read_report: Callable[..., dict[str, Any]]
) -> None:
    conftest = quick.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + """
from _pytest.runner import runtestprotocol
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=nextitem, log=False)
    item._initrequest()
    runtestprotocol(item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
    )
    quick.makepyfile(
        """
        import time
        lengths = [0.3, 0.3, 0.05, 0.05]
        def test_it(energy):
            energy(lambda: time.sleep(lengths.pop(0)))
        """
    )
    quick.runpytest("--junitxml=junit.xml", "--energy-report").assert_outcomes(passed=1)
    # The report has only the record of the last one.
    (record,) = read_report()["records"]
    last_j = record["metrics"]["energy_j"]["value"]
    assert float(properties(quick, "test_it")["llenergy.energy_j"]) == pytest.approx(last_j, rel=1e-9)


def test_text_that_xml_cannot_contain_is_escaped(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        r"""
        import time
        def test_it(energy_meter):
            with energy_meter("a\udc80\x01<&>"):
                time.sleep(0.05)
        """
    )
    quick.runpytest("--junitxml=junit.xml").assert_outcomes(passed=1)
    values = properties(quick, "test_it")
    assert r"llenergy.window.a\udc80\x01<&>.energy_j" in values
