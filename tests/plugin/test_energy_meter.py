# SPDX-License-Identifier: Apache-2.0
"""The ``energy_meter`` fixture: named windows in the test's own process."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.clock


def test_windows_are_labelled_and_have_their_uncertainty(pytester: pytest.Pytester) -> None:
    # Two tests, because a nap that is too small to resolve makes its test invalid.
    pytester.makepyfile(
        "import time\ndef test_it(energy_meter):\n"
        "    with energy_meter('work'):\n"
        "        end_s = time.process_time() + 0.3\n"
        "        while time.process_time() < end_s:\n            pass\n"
        "def test_nap(energy_meter):\n"
        "    with energy_meter('nap') as nap:\n        time.sleep(0.3)\n"
        "    assert nap.record.energy_j is None or nap.energy_j < 0.1\n"
    )
    result = pytester.runpytest("--energy-meter=estimate")
    result.assert_outcomes(passed=2)
    # Joined, because the lines are folded to the terminal.
    text = " ".join(result.stdout.str().split())
    assert re.search(r"test_it · work: \S+ ± \S+ m?J in \S+ s, joules estimated", text)
    assert "energy estimated (see llenergy doctor)" in text


FAILED_START = """
import threading

import pytest
from pytest_llenergy.energy import Measuring

def test_start(energy_meter, monkeypatch):
    start = Measuring.start

    def interrupted(self):
        start(self)
        raise TimeoutError("a time limit that ended while the first tick was awaited")

    monkeypatch.setattr(Measuring, "start", interrupted)
    with pytest.raises(TimeoutError):
        energy_meter("w")

def test_nothing_reads_any_more():
    assert "llenergy-sampler" not in [thread.name for thread in threading.enumerate()]
"""


def test_meters_are_closed_if_their_start_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILED_START)
    # The first test fails, since it measured nothing.
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, failed=1)
