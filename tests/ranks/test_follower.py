# SPDX-License-Identifier: Apache-2.0
"""A rank that holds a part of a model ends with the processes of its backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCH = """
import subprocess, sys, time
from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.ranks.follower import WorkerWatch

process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
ends_first = sys.argv[1] == "before"
if ends_first:
    process.communicate(b"\\n")
watch = WorkerWatch([BackendWorker(pid=process.pid, rank=0, world_size=1)])
if not ends_first:
    process.communicate(b"\\n")
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_ends_with_a_process_that_ends_before_or_after_its_watch_begins(when: str) -> None:
    done = subprocess.run([sys.executable, "-c", WATCH, when], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1, done.stderr
    assert "a process of the backend has ended (pid " in done.stdout
