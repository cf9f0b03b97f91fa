# SPDX-License-Identifier: Apache-2.0
"""Fixtures for inner runs with pytest-benchmark and pytest-xdist, and for those compared with a baseline."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .inner import ONE, WATTS_FROM_ENV, fake_measure
from .suites import SHORT


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only xdist and this package in inner runs: every worker spends a second on the others."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,xdist.looponfail,pytest_llenergy.plugin")


@pytest.fixture
def bench(quick: pytest.Pytester, no_xdist: None) -> Callable[..., pytest.RunResult]:
    """Return a function that runs a suite of benchmarks with a report."""

    def run(suite: str, *args: str) -> pytest.RunResult:
        quick.makepyfile(suite)
        return quick.runpytest("--energy-report", *SHORT, *args)

    return run


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester with few short rounds per test and a meter whose power is set by WATTS."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("WATTS", "10")
    monkeypatch.setenv("KIND", "measured")
    pytester.makeini(
        "[pytest]\nenergy_rounds = 6\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_target = 50%\n"
    )
    pytester.makeconftest("import os\n" + WATTS_FROM_ENV)
    return pytester


@pytest.fixture
def quick_suite(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return the same pytester with ``measure`` replaced by one that does not wait."""
    monkeypatch.setattr("pytest_llenergy.plugin.handles.energy.measure_on_hosts", fake_measure)
    return suite


@pytest.fixture
def base(quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester with one test and its baseline at 10 W; later runs draw 11 W."""
    quick_suite.makepyfile(test_some=ONE)
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=1)
    monkeypatch.setenv("WATTS", "11")
    return quick_suite
