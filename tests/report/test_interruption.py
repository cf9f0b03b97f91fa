# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment loses no record of a finished test, and leaves no process and no lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_llenergy.model.report import Report
from pytest_llenergy.report.store import read_report

from ..conftest import TEN_WATTS
from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..workers.survivors import check_nothing_is_left, marked

pytestmark = pytest.mark.usefixtures("few_plugins", "no_xdist")

#: The first test ends, then something runs that only Ctrl-C ends.
SUITE = """
import time
from pathlib import Path

def test_first(energy):
    energy(time.sleep, 0.01)
    Path("ending").touch()

def test_second(energy):
    energy(time.sleep, 0.01)

def test_last():
    time.sleep(600)
"""

#: Source of a hook that runs after the plugin's, in pytest's only process or in workers and controller.
FINISHED = """
from pathlib import Path
@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "call" and report.nodeid.endswith("test_first"):
        Path("finished").touch()
"""

COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--energy-report"]


def wait_for(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Start pytest in a process group of its own, and check that it leaves no process and no lease."""
    with marked() as mark:
        with subprocess.Popen(
            [*COMMAND, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as process:
            yield process
            process.communicate(timeout=120)
        check_nothing_is_left(mark)


def kept(directory: Path) -> Report | None:
    """Return the report, else the one that the journal makes."""
    files = [directory / "energy.json", *directory.glob("energy.*.journal.jsonl")]
    return next((read_report(path) for path in files if path.exists()), None)


def check_kept(directory: Path, *ids: str) -> Report:
    report = kept(directory)
    assert report is not None
    assert not report.run.complete
    assert {"test_it.py::" + name for name in ids} <= {record.id for record in report.records}
    assert all(record.metrics["energy_j"].value for record in report.records if record.status == "measured")
    return report


def stop(process: subprocess.Popen[str], whole_group: bool) -> None:
    """Send the signal of Ctrl-C to pytest, or to all processes in the foreground as a terminal does."""
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)


@pytest.fixture
def suite(quick: pytest.Pytester) -> pytest.Pytester:
    quick.makeconftest(TEN_WATTS + FINISHED)
    quick.makepyfile(test_it=SUITE)
    return quick


def sweep(suite: pytest.Pytester, delay_s: float, options: tuple[str, ...], group: bool, again_s: float) -> None:
    for name in ("ending", "finished", "energy.json"):
        (suite.path / name).unlink(missing_ok=True)
    for journal in suite.path.glob("*.jsonl"):
        journal.unlink()
    with running(*options) as process:
        wait_for((suite.path / "ending").exists)
        time.sleep(delay_s)
        stop(process, group)
        if again_s >= 0:
            time.sleep(again_s)
            stop(process, group)
    # pytest itself ends in a traceback if the second one comes before its summary.
    assert process.returncode == 2 or again_s >= 0
    if (suite.path / "finished").exists():
        check_kept(suite.path, "test_first")
    else:
        assert delay_s < 1


STEPS = [
    pytest.param(delay, marks=() if delay in (0, 40) else pytest.mark.slow) for delay in range(0, 305, 5)
]


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "-n2"])
@pytest.mark.parametrize("delay_ms", STEPS)
def test_ctrl_c_after_a_test_keeps_its_record(
    suite: pytest.Pytester, delay_ms: int, options: tuple[str, ...]
) -> None:
    sweep(suite, delay_ms / 1000, options, group=delay_ms % 10 == 0, again_s=-1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "-n2"])
@pytest.mark.parametrize("delay_ms", [0, 20, 80, 300])
@pytest.mark.parametrize("again_ms", [0, 1, 2, 5, 10, 20, 30, 50, 100, 200, 500])
def test_ctrl_c_twice_keeps_the_record(
    suite: pytest.Pytester, delay_ms: int, again_ms: int, options: tuple[str, ...]
) -> None:
    sweep(suite, delay_ms / 1000, options, group=again_ms % 2 == 0, again_s=again_ms / 1000)
