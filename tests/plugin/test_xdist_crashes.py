# SPDX-License-Identifier: Apache-2.0
"""Crashes of xdist workers: finished records are kept, the interrupted test is recorded as crashed."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llenergy.report.store import read_report as load_report

from .suites import Read

pytestmark = pytest.mark.usefixtures("few_plugins", "no_xdist")

#: A plugin that ends the worker in the phase that the variable DIE names.
HOOKS = """
import os, pytest
def die(nodeid, where):
    if os.environ.get("DIE") == where and "test_dies" in nodeid:
        HOW
class Dies:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        die(nodeid, "logstart")
    def pytest_runtest_logfinish(self, nodeid):
        die(nodeid, "logfinish")
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Dies())
@pytest.fixture
def dying(request):
    die(request.node.nodeid, "setup")
    yield
    die(request.node.nodeid, "teardown")
"""

SUITE = """
import time
from dying import die
def test_a(energy):
    energy(time.sleep, 0.01)
def test_dies(dying, energy):
    die("test_dies", "before")
    energy(time.sleep, 0.01)
    die("test_dies", "after")
def test_z(energy):
    energy(time.sleep, 0.01)
def test_plain():
    pass
"""

#: Source of a hook that keeps the journal, which a complete run deletes.
KEEPS_JOURNAL = """
import glob, shutil
def pytest_llenergy_report(config, report):
    shutil.copy(glob.glob("*.jsonl")[0], "kept.journal.jsonl")
"""

HOWS = {"exit": "os._exit(0)", "kill": "os.kill(os.getpid(), 9)"}

#: Crashes in the default run. test_xdist.py has one before the test has a result.
QUICK = [("teardown", "exit")]


def by_test(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each test in order of attempt; fail if an attempt is there twice."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in report["records"]:
        found.setdefault(record["id"].rpartition("::")[2], []).append(record)
    for records in found.values():
        assert [record["attempt"] for record in records] == list(range(1, len(records) + 1))
    return found


@pytest.fixture
def dying(quick: pytest.Pytester) -> pytest.Pytester:
    quick.makepyfile(dying=HOOKS.replace("HOW", HOWS["exit"]))
    return quick


@pytest.mark.parametrize(
    ("where", "how"),
    [
        pytest.param(where, how, marks=() if (where, how) in QUICK else pytest.mark.slow, id=f"{where}-{how}")
        for where in ("setup", "before", "after", "teardown", "logfinish")
        for how in HOWS
    ],
)
@pytest.mark.slow
def test_crash_in_any_phase_is_recorded_once(
    quick: pytest.Pytester, read_report: Read, monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    quick.makepyfile(SUITE, dying=HOOKS.replace("HOW", HOWS[how]))
    with (quick.path / "conftest.py").open("a") as conftest:
        conftest.write(KEEPS_JOURNAL)
    monkeypatch.setenv("DIE", where)
    result = quick.runpytest_subprocess("--energy-report", "-n1", "-p", "dying")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    report = read_report()
    found = by_test(report)
    assert set(found) == {"test_a", "test_dies", "test_z"}
    assert [record["status"] for record in found["test_a"] + found["test_z"]] == ["measured"] * 2
    (record,) = found["test_dies"]
    assert record["status"] == "crashed"
    # A measurement that was complete is kept although the test crashed.
    finished = where in ("teardown", "logfinish")
    assert bool(record["metrics"]) == bool(record["rounds"]) == finished
    assert record["reason"].endswith("test_dies', after its measured result" if finished else "test_dies'")
    assert report["run"]["complete"] is True
    crashed = [line for line in result.outlines if line.startswith("CRASHED ")]
    assert len(crashed) == 1
    # The journal has two lines for a test that crashed after its result; its reader keeps one record.
    kept, written = (load_report(quick.path / name) for name in ("kept.journal.jsonl", "energy.json"))
    assert list(kept.records) == list(written.records)
    assert [path.name for path in quick.path.glob("*.jsonl")] == ["kept.journal.jsonl"]


# Not loadgroup: with pytest 9.2, xdist 3.8 waits forever for a test that killed its worker.
@pytest.mark.parametrize(
    "dist",
    [
        "load",
        *(pytest.param(dist, marks=pytest.mark.slow) for dist in ("loadscope", "loadfile", "worksteal")),
    ],
)
@pytest.mark.slow
def test_crash_is_recorded_in_every_distribution_mode(
    dying: pytest.Pytester, read_report: Read, monkeypatch: pytest.MonkeyPatch, dist: str
) -> None:
    """Some modes rerun a test that killed its worker: that is its next attempt."""
    once = """
    import os
    try:
        os.mkdir("died")
        die("test_dies", "before")
    except FileExistsError:
        pass
"""
    dying.makepyfile(SUITE.replace('    die("test_dies", "before")\n', once))
    monkeypatch.setenv("DIE", "before")
    dying.runpytest_subprocess("--energy-report", "-n2", f"--dist={dist}", "-p", "dying")
    report = read_report()
    found = by_test(report)
    attempts = [[record["status"] for record in found[name]] for name in found if "test_dies" in name]
    assert attempts in ([["crashed"]], [["crashed", "measured"]])
    assert set(found) == {"test_a", "test_dies", "test_z"}
    others = [record for name in found if "test_dies" not in name for record in found[name]]
    assert {record["status"] for record in others} == {"measured"}
    assert report["run"]["complete"] is True


@pytest.mark.slow
def test_each_crash_of_a_rerun_test_is_an_attempt(dying: pytest.Pytester, read_report: Read) -> None:
    dying.makepyfile(
        "import os\ndef test_it(energy):\n    os._exit(1)\ndef test_z(energy):\n    energy(int)\n"
    )
    dying.runpytest_subprocess("--energy-report", "-n1", "--dist=loadfile", "--max-worker-restart=2")
    report = read_report()
    assert [record["status"] for record in by_test(report)["test_it"]] == ["crashed"] * 3
    assert report["run"]["complete"] is False, "the other one had no turn"


@pytest.mark.slow
def test_crashes_of_replacement_workers_are_recorded(dying: pytest.Pytester, read_report: Read) -> None:
    dying.makepyfile(
        """
        import os, time, pytest
        @pytest.mark.parametrize("i", range(6))
        def test_it(energy, i):
            energy(time.sleep, 0.01)
            if i in (1, 2, 4):
                os._exit(1)
        """
    )
    dying.runpytest_subprocess("--energy-report", "-n1")
    report = read_report()
    states = [(record["id"][-2], record["status"]) for record in report["records"]]
    assert sorted(states) == [(str(i), "crashed" if i in (1, 2, 4) else "measured") for i in range(6)]
    assert report["run"]["complete"] is True


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_report_is_incomplete_without_replacement_workers(
    dying: pytest.Pytester, read_report: Read, restarts: int
) -> None:
    """Tests that did not start have no record, and the report is marked as incomplete."""
    dying.makepyfile(
        """
        import os, time, pytest
        @pytest.mark.parametrize("i", range(6))
        def test_it(energy, i):
            energy(time.sleep, 0.01)
            if i:
                os._exit(1)
        """
    )
    result = dying.runpytest_subprocess("--energy-report", "-n1", f"--max-worker-restart={restarts}")
    report = read_report()
    states = [record["status"] for record in report["records"]]
    assert states == ["measured", "crashed", "crashed"][: 2 + restarts]
    assert report["run"]["complete"] is False
    assert result.ret != 0


def test_failure_before_a_crash_keeps_its_reason(
    dying: pytest.Pytester, read_report: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE", "teardown")
    dying.makepyfile("def test_dies(dying, energy):\n    assert 1 == 2\n")
    dying.runpytest_subprocess("--energy-report", "-n1", "-p", "dying")
    (record,) = read_report()["records"]
    assert (record["status"], record["reason"]) == ("failed", "assert 1 == 2")
