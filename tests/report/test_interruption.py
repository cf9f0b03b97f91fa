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

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.store import read_report

from ..conftest import TEN_WATTS
from ..ranks.survivors import check_nothing_is_left, marked

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
    while True:
        time.sleep(0.05)
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


def wait_for(met: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not met():
        assert process.poll() is None, process.communicate()[0]
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
            try:
                yield process
                process.communicate(timeout=120)
            except BaseException:
                # Otherwise the block would wait for it.
                process.kill()
                raise
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


def sweep(
    suite: pytest.Pytester, delay_s: float, options: tuple[str, ...], group: bool, again_s: float
) -> None:
    for name in ("ending", "finished", "energy.json"):
        (suite.path / name).unlink(missing_ok=True)
    for journal in suite.path.glob("*.jsonl"):
        journal.unlink()
    with running(*options) as process:
        wait_for((suite.path / "ending").exists, process)
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


STEPS = [pytest.param(delay, marks=() if delay == 20 else pytest.mark.slow) for delay in range(0, 301, 20)]


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "-n2"])
@pytest.mark.parametrize("delay_ms", STEPS)
def test_ctrl_c_after_a_test_keeps_its_record(
    suite: pytest.Pytester, delay_ms: int, options: tuple[str, ...]
) -> None:
    sweep(suite, delay_ms / 1000, options, group=delay_ms % 40 == 0, again_s=-1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "-n2"])
@pytest.mark.parametrize("delay_ms", [0, 80])
@pytest.mark.parametrize("again_ms", [0, 5, 20, 100, 500])
def test_ctrl_c_twice_keeps_the_record(
    suite: pytest.Pytester, delay_ms: int, again_ms: int, options: tuple[str, ...]
) -> None:
    sweep(suite, delay_ms / 1000, options, group=again_ms % 2 == 0, again_s=again_ms / 1000)


#: Source of a wait. Python acts on a signal that comes just before a sleep only after it, so each is short.
WAIT = 'Path("there").touch(); any(time.sleep(0.05) for _ in range(12000))'
#: Sources of conftest and tests that stop in some moment after the first test, or before it.
FIRST = "import time\nfrom pathlib import Path\ndef test_first(energy): energy(time.sleep, 0.01)\n"
COLLECTING = f"def pytest_collection_modifyitems(): {WAIT}\n"
HOOK = f"def pytest_llenergy_report(): {WAIT}\n"
SUMMARY = f"def pytest_terminal_summary(): {WAIT}\n"
FINISHING = f"@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(): {WAIT}\n"
STARTS_RANKS = "def work(): pass\ndef test_last(workers): workers.run(work)\n"
#: Python imports this module when it starts.
RANK_WAITS = f"""
import sys, time
from pathlib import Path
if any(each.endswith("ranks/rank.py") for each in sys.orig_argv): {WAIT}
"""
LOADS = "def test_last(backend): backend.generate(['a'])\n"
SLOW_BACKEND = """
import time
from pathlib import Path
from pytest_llenergy.backends.base import BackendSpec, Capabilities
class Slow:
    def load(self, model, options, context): WAIT
SPEC = BackendSpec("slow", "slow_backend:Slow", (), "pip install slow", Capabilities())
"""
USES_BACKEND = (
    "def pytest_llenergy_backends(config):\n    import slow_backend\n    return [slow_backend.SPEC]\n"
)


@pytest.mark.parametrize(
    ("conftest", "tests", "complete"),
    [
        pytest.param(COLLECTING, "", None, id="collection"),
        pytest.param("", STARTS_RANKS, False, id="start of ranks", marks=pytest.mark.slow),
        pytest.param(USES_BACKEND, LOADS, False, id="loading a model", marks=pytest.mark.slow),
        pytest.param(HOOK, "", True, id="hook before the report"),
        pytest.param(FINISHING, "", True, id="end of the session", marks=pytest.mark.slow),
        pytest.param(SUMMARY, "", True, id="summary", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_another_moment(
    quick: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    conftest: str,
    tests: str,
    complete: bool | None,
) -> None:
    quick.makeconftest(TEN_WATTS + "from pathlib import Path\n" + conftest)
    quick.makepyfile(
        test_it=FIRST + tests,
        slow_backend=SLOW_BACKEND.replace("WAIT", WAIT),
        sitecustomize=RANK_WAITS if tests == STARTS_RANKS else "",
    )
    monkeypatch.setenv("PYTHONPATH", str(quick.path), prepend=":")
    with running("--energy-backend=slow") if tests == LOADS else running() as process:
        wait_for((quick.path / "there").exists, process)
        stop(process, whole_group=True)
    # In pytest's own last steps it ends Python.
    assert process.returncode == (-2 if conftest in (SUMMARY, FINISHING) else 2)
    report = kept(quick.path)
    assert (report and report.run.complete) is complete
    assert conftest != HOOK or (report and report.run.exit_status) == 2
    assert not list(quick.path.glob("*.jsonl"))


#: Hooks of other plugins between the end of a test and the keeping of its record.
RECORD_HOOK = f"def pytest_llenergy_record(): {WAIT}\n"
REPORT_HOOK = f"""
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    report = yield
    if call.when == "call": {WAIT}
    return report
"""


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "-n2"])
@pytest.mark.parametrize("hook", [RECORD_HOOK, REPORT_HOOK], ids=["record", "report"])
@pytest.mark.slow
def test_ctrl_c_ends_a_slow_hook_and_keeps_the_record(
    quick: pytest.Pytester, hook: str, options: tuple[str, ...]
) -> None:
    quick.makeconftest(TEN_WATTS + "from pathlib import Path\n" + hook)
    quick.makepyfile(test_it=FIRST)
    with running(*options) as process:
        wait_for((quick.path / "there").exists, process)
        stop(process, whole_group=True)
    assert process.returncode == 2
    report = check_kept(quick.path, "test_first")
    assert [record.status for record in report.records] == ["measured"]


def test_a_hook_that_fails_loses_no_record(quick: pytest.Pytester) -> None:
    quick.makeconftest(TEN_WATTS + "def pytest_llenergy_record(): 1 / 0\n")
    quick.makepyfile(test_it=FIRST, test_other="def test_other(): pass\n")
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(passed=1, failed=1)
    assert "the hook pytest_llenergy_record raised ZeroDivisionError" in result.stdout.str()
    report = kept(quick.path)
    assert report is not None
    (record,) = report.records
    assert (record.status, bool(record.rounds)) == ("failed", True)
    assert "ZeroDivisionError: division by zero (conftest.py:" in str(record.reason)


def test_ctrl_c_while_waiting_for_a_lease(quick: pytest.Pytester) -> None:
    quick.makeconftest(
        TEN_WATTS
        + "from pathlib import Path\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_setup(item):\n"
        "    if item.name == 'test_waits':\n        Path('there').touch()\n"
        "        while not Path('go').exists(): time.sleep(0.01)\n"
    )
    quick.makepyfile(test_it=FIRST + "def test_waits(energy): pass\n")
    with running("-rA") as process:
        wait_for((quick.path / "there").exists, process)
        lock = acquire(LockRequest((DeviceLock(CPU),)), 0.0)
        (quick.path / "go").touch()
        time.sleep(0.5)
        stop(process, whole_group=True)
        process.wait()
        lock.release()
    assert process.returncode == 2
    check_kept(quick.path, "test_first")


def test_ctrl_c_while_the_page_is_drawn_keeps_the_report(quick: pytest.Pytester) -> None:
    pytest.importorskip("jinja2")
    conftest = f"from pytest_llenergy.report.html import page\ndef render_report(report): {WAIT}\n"
    quick.makeconftest(
        f"{TEN_WATTS}\nfrom pathlib import Path\n{conftest}page.render_report = render_report\n"
    )
    quick.makepyfile(test_it=FIRST)
    with running("--energy-html") as process:
        wait_for((quick.path / "there").exists, process)
        assert (quick.path / "energy.json").exists()
        stop(process, whole_group=True)
    assert process.returncode == 2
    report = kept(quick.path)
    assert report is not None
    assert len(report.records) == 1
    assert not list(quick.path.glob(".energy*"))


def test_ctrl_c_while_the_report_is_written_ends_the_run_in_order(quick: pytest.Pytester) -> None:
    quick.makeconftest(
        TEN_WATTS + "import os, signal\nfrom pytest_llenergy.plugin.report_builder import ReportBuilder\n"
        "write = ReportBuilder.write\n"
        "def interrupted(*given):\n    os.kill(os.getpid(), signal.SIGINT)\n    return write(*given)\n"
        "ReportBuilder.write = interrupted\n"
    )
    quick.makepyfile(test_it=FIRST + "def test_fails(): assert not 'seen'\n")
    with running() as process:
        output = process.communicate()[0]
    assert process.returncode == 2
    assert "1 failed, 1 passed" in output
    report = kept(quick.path)
    assert report is not None
    assert len(report.records) == 1
