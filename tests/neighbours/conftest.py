# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run pytest with named plugins only, whatever else is installed."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from ..ranks.no_torch import without_torch
from .runs import FinishedRun, RunSuite


@pytest.fixture
def run_suite(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunSuite:
    """Return a function that runs a suite with a report and these plugins in a subprocess."""
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "COVERAGE_PROCESS_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    without_torch(quick.path)
    installed = {each.name for each in entry_points(group="pytest11")}

    def run(suite: str | dict[str, str], *args: str, plugins: tuple[str, ...] = ()) -> FinishedRun:
        for plugin in plugins:
            if plugin not in installed:
                pytest.skip(f"the plugin {plugin} is not installed; tox run -e neighbours has it")
        files = suite if isinstance(suite, dict) else {"test_it": suite}
        quick.makepyfile(**files)
        named = [part for name in ("llenergy", *plugins) for part in ("-p", name)]
        return FinishedRun(
            quick.runpytest_subprocess(*named, "--energy-report=energy.json", *args), quick.path
        )

    return run


@pytest.fixture
def ten_watts(quick: pytest.Pytester) -> str:
    """Return the source of the conftest with the ten-watt meter, to be extended."""
    return (quick.path / "conftest.py").read_text()
