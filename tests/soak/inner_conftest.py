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
from pathlib import Path
from typing import Any

import psutil
import pytest

#: Each process of pytest samples itself and its guard after so many tests.
SAMPLE_EVERY = 10

_tests_run = 0


def _log(name: str, entry: dict[str, Any]) -> None:
    # One write, so that the lines of several processes stay whole, and before anything else happens.
    descriptor = os.open(Path(os.environ["SOAK_LOGS"]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (json.dumps(entry) + "\n").encode())
    os.close(descriptor)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _tests_run
    result = yield
    _tests_run += 1
    if _tests_run % SAMPLE_EVERY == 0:
        _log("samples.jsonl", _sample())
    if time.time() > float(os.environ["SOAK_UNTIL"]):
        item.session.shouldstop = "the time is up"
    return result


def _sample() -> dict[str, Any]:
    pytest_ = psutil.Process()
    descendants = pytest_.children(recursive=True)
    supervisors = [each for each in descendants if each.ppid() == pytest_.pid]
    return {
        "pid": pytest_.pid,
        "tests": _tests_run,
        "fds": pytest_.num_fds(),
        "threads": pytest_.num_threads(),
        "memory_bytes": pytest_.memory_info().rss,
        "processes": len(descendants),
        # There are up to three of them, one for each environment of ranks.
        "supervisor_fds": max((each.num_fds() for each in supervisors), default=0),
        "supervisor_memory_bytes": max((each.memory_info().rss for each in supervisors), default=0),
    }
