# SPDX-License-Identifier: Apache-2.0
"""Fixtures for inner runs with pytest-benchmark and pytest-xdist."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
