# SPDX-License-Identifier: Apache-2.0
"""Running pytest beside plugins that are named, and no others that happen to be installed."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from .runs import Beside, Ran


@pytest.fixture
def beside(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Beside:
    """Run a suite with a report in a process of its own, beside the plugins of these entry points."""
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "COVERAGE_PROCESS_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    installed = {each.name for each in entry_points(group="pytest11")}

    def run(suite: str | dict[str, str], *args: str, plugins: tuple[str, ...] = ()) -> Ran:
        for plugin in plugins:
            if plugin not in installed:
                pytest.skip(f"the plugin {plugin} is not installed; tox run -e neighbours has it")
        files = suite if isinstance(suite, dict) else {"test_it": suite}
        quick.makepyfile(**files)
        named = [part for name in ("llenergy", *plugins) for part in ("-p", name)]
        return Ran(quick.runpytest_subprocess(*named, "--energy-report=energy.json", *args), quick.path)

    return run


@pytest.fixture
def ten_watts(quick: pytest.Pytester) -> str:
    """What a conftest file needs for the meter of the suite, where one is added to."""
    return (quick.path / "conftest.py").read_text()
