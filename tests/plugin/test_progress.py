# SPDX-License-Identifier: Apache-2.0
"""Progress of long tests and of waits, a line now and then."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..conftest import TEN_WATTS

#: Plain tests around two measured ones.
AMONG_OTHERS = """
import time
def test_a(): pass
def test_measured(energy):
    energy(time.sleep, 0.1)
def test_b(): pass
def test_also_measured(energy):
    energy(time.sleep, 0.1)
def test_c(): pass
"""

#: Options that select the first measured test.
ONE = ("-k", "test_measured")

#: Source of a conftest that prints progress lines after 0.2 s instead of ten seconds.
SOON = (
    TEN_WATTS
    + "\nfrom pytest_llenergy.plugin import progress\n"
    + "progress.FIRST_LINE_S, progress.NEXT_LINE_S = 0.2, 0.2\n"
)


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
@pytest.mark.slow
def test_long_work_without_a_terminal_prints_lines(quick: pytest.Pytester, capture: str) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(
        test_it="""
        import os, sys, time
        def work():
            print("printed by the test")
            os.write(2, b"written by the test\\n")
            time.sleep(0.1)
        def test_measured(energy):
            energy(work)
            raise RuntimeError("what was captured is shown")
        """
    )
    result = quick.runpytest_subprocess("test_it.py", f"--capture={capture}", "--color=no")
    lines = [line for line in result.stdout.lines if line.startswith("energy: test_it.py::")]
    # There is a first line only if the machine is slow.
    assert len(lines) <= 2
    message = r"energy: test_it.py::test_measured: round 2 of 2, \d+ s left \(\d+ s since it began\)"
    assert re.fullmatch(message, lines[-1])
    assert "\x1b" not in result.stdout.str()
    if capture in ("fd", "sys"):
        # No progress line was captured as output of the test, and no output was lost.
        captured = result.stdout.str().partition("Captured stdout call")[2]
        assert captured.partition("-----\n")[2].startswith("printed by the test\nprinted by the test\n")


@pytest.mark.parametrize("arguments", [["-q", "-s"], ["-s", "-n1"]])
@pytest.mark.slow
def test_quiet_runs_and_workers_show_no_progress(quick: pytest.Pytester, arguments: list[str]) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(test_it=AMONG_OTHERS)
    result = quick.runpytest_subprocess(*arguments, *ONE)
    assert "round " not in result.stdout.str() + result.stderr.str()


#: Source of a conftest that says at once what a test waits for, so that a busy machine cannot miss it.
SOON_WAITS = SOON + "from pytest_llenergy.devices import locks\nlocks.WAIT_MESSAGE_FIRST_S = 0.3\n"

HOLDER = """
import sys, time
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
held = acquire(LockRequest(always=(DeviceLock(CPU),)), 5.0, "other.py::test_of_others")
print("held", flush=True)
sys.stdin.read()
held.release()
"""


@pytest.mark.parametrize("arguments", [[], ["-q"], ["-n1"]])
@pytest.mark.slow
def test_a_wait_for_devices_is_shown_even_if_progress_is_silent(
    quick: pytest.Pytester, arguments: list[str]
) -> None:
    quick.makeconftest(SOON_WAITS)
    quick.makepyfile(test_it=AMONG_OTHERS)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        result = quick.runpytest_subprocess("test_it.py", *ONE, "--energy-lease-timeout=4", *arguments)
        holder.stdin.close()
    message = f"energy: test_it.py::test_measured: waiting for cpu: held by process {holder.pid} of "
    seen = result.stderr if arguments == ["-n1"] else result.stdout
    (line,) = (line for line in seen.lines if line.startswith(message))
    assert "(other.py::test_of_others)" in line
    assert "round 1" not in result.stdout.str()
