# SPDX-License-Identifier: Apache-2.0
"""Inner runs that are held against a baseline."""

from __future__ import annotations

import pytest

from .inner import ONE, TOLD_WATTS, told


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytester with a few short rounds a test, and a meter whose watts are told."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("WATTS", "10")
    monkeypatch.setenv("KIND", "measured")
    pytester.makeini(
        "[pytest]\nenergy_rounds = 6\nenergy_warmup = 0\nenergy_gap = 0.05\nenergy_budget = 0.1\n"
        "energy_target = 50%\n"
    )
    pytester.makeconftest("import os\n" + TOLD_WATTS)
    return pytester


@pytest.fixture
def quick_suite(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The same without the seconds that measuring takes: what the rounds tell is given."""
    monkeypatch.setattr("pytest_llenergy.api.measure", told)
    return suite


@pytest.fixture
def base(quick_suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """With one test and its baseline of ten watts; from here on there are eleven."""
    quick_suite.makepyfile(test_some=ONE)
    quick_suite.runpytest("--energy-report=base.json").assert_outcomes(passed=1)
    monkeypatch.setenv("WATTS", "11")
    return quick_suite
