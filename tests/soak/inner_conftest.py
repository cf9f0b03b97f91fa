# SPDX-License-Identifier: Apache-2.0
"""Choose the tests of one run of the soak test, and log what finished and what each process used.

Copied beside the tests as ``conftest.py``. The environment has all settings (``SOAK_*``).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

#: Processes of pytest sample themselves, their guards and their supervisors after so many tests.
SAMPLE_EVERY = 5

#: Kinds of tests that end the supervisor, which a calm run leaves out, so that its growth shows.
NOT_CALM = "test_killed_supervisor"

#: Kept open by a run that is to leak (``SOAK_LEAKS``).
_leaked: list[int] = []

_tests_run, _is_controller = 0, False


def _log(name: str, entry: dict[str, Any]) -> None:
    # One write, so that the lines of several processes stay whole, and before anything else happens.
    descriptor = os.open(Path(os.environ["SOAK_LOGS"]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (json.dumps(entry) + "\n").encode())
    os.close(descriptor)


def pytest_configure(config: pytest.Config) -> None:
    global _is_controller
    _is_controller = config.pluginmanager.has_plugin("dsession")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ["SOAK_CALM"]:
        items[:] = [item for item in items if not item.name.startswith(NOT_CALM)]
    random.Random(os.environ["SOAK_SEED"]).shuffle(items)
    wanted = int(os.environ["SOAK_TESTS"])
    config.hook.pytest_deselected(items=items[wanted:])
    del items[wanted:]


# After the plugin has kept the record.
@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    record = getattr(report, "llenergy", None)
    entry = {
        "id": report.nodeid,
        "when": report.when,
        "outcome": "xfailed" if hasattr(report, "wasxfail") else report.outcome,
        "duration_s": report.duration,
        "recorded": record is not None,
        "lease_wait_s": record["lease_wait_s"] if record is not None else None,
        "message": "" if report.outcome == "passed" else report.longreprtext[-2000:],
    }
    _log("finished.jsonl", entry)
    if _is_controller:
        _count_test("controller")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    result = yield
    _count_test("pytest")
    if os.environ["SOAK_LEAKS"]:
        _leaked.append(os.open("/dev/null", os.O_RDONLY))
    if time.time() > float(os.environ["SOAK_UNTIL"]):
        item.session.shouldstop = "the time is up"
    return result


def _count_test(role: str) -> None:
    """Count a test, and sample this process, its guards and its supervisors."""
    global _tests_run
    _tests_run += 1
    # Processes may end meanwhile.
    if _tests_run % SAMPLE_EVERY == 0:
        with suppress(psutil.Error):
            _log_samples(role)


def _log_samples(role: str) -> None:
    own = psutil.Process()
    _log("samples.jsonl", _sample(role, own, len(own.children(recursive=True))))
    for guard in own.children():
        if "ranks.supervisor" in " ".join(guard.cmdline()):
            _log("samples.jsonl", _sample("guard", guard, 0))
            for supervisor in guard.children():
                _log("samples.jsonl", _sample("supervisor", supervisor, 0))


def _sample(role: str, process: psutil.Process, descendants: int) -> dict[str, Any]:
    return {
        "role": role,
        "pid": process.pid,
        "tests": _tests_run,
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "processes": descendants,
        "memory_bytes": process.memory_info().rss,
    }
