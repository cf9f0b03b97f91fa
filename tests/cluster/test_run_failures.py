# SPDX-License-Identifier: Apache-2.0
"""What ends in the middle of a run on two hosts: the record, the later tests, and what is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from .runs import ClusterRuns

#: Within this time nothing of a run may be left (seconds).
GONE_S = 5.0

#: Names the processes of one run in the environment that they inherit.
MARK = "LLENERGY_TEST_MARK"

VICTIMS = """
import os, platform, signal, time
import psutil, pytest

def end(what):
    import torch.distributed as dist
    if dist.get_rank() == 3:
        time.sleep(0.3)
        agents = [
            each
            for each in psutil.Process().parents()
            if any("cluster.agent" in word for word in each.cmdline())
        ]
        # The agent's parent is its guard, with the same command line.
        victims = {"rank": os.getpid(), "agent": agents[0].pid, "frozen": agents[0].pid}
        os.kill(victims[what], signal.SIGSTOP if what == "frozen" else signal.SIGKILL)
    time.sleep(60)

@pytest.mark.gpus(4, per_host=2)
def test_before(workers):
    assert len(set(workers.run(os.getpid))) == 4

@pytest.mark.gpus(4, per_host=2)
def test_ended(workers, energy):
    energy(workers.call(end, WHAT))

@pytest.mark.gpus(2)
def test_one_host(workers):
    assert len(workers.run(platform.node)) == 2

@pytest.mark.gpus(4, per_host=2)
def test_two_hosts(workers):
    assert len(workers.run(platform.node)) == 4
"""

LONG = """
import time
import pytest

@pytest.mark.gpus(2, per_host=1)
def test_long(workers):
    workers.run(time.sleep, 600)
"""


def marked(mark: str) -> dict[int, str]:
    """Return pid and command of the package's processes whose environment contains the mark."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes() and "pytest" in command:
                found[int(each.name)] = command
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rank", "was killed by SIGKILL"),
        ("agent", "its agent has closed its connection"),
        ("frozen", "its agent has not answered for 3 s"),
    ],
)
def test_a_run_goes_on_with_the_hosts_that_are_left(
    cluster_runs: ClusterRuns, what: str, message: str
) -> None:
    done = cluster_runs.run(VICTIMS.replace("WHAT", repr(what)), "--energy-rounds=2", "--energy-warmup=0")
    statuses = {each.id.partition("::")[2]: each for each in cluster_runs.report.records}
    assert message in done.stdout, done.stdout + done.stderr
    assert statuses["test_ended"].status == "failed"
    if what == "rank":
        assert "1 failed, 3 passed" in done.stdout, done.stdout
        return
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    lost = cluster_runs.hosts[1].name
    assert f"{lost}: its agent" in done.stdout.partition("SKIPPED")[2]


@pytest.mark.slow
def test_pytest_is_killed_at_any_moment(cluster_runs: ClusterRuns) -> None:
    """From the first import to ranks at work; nothing is left on any host, and the next run starts."""
    mark, worst_s = uuid.uuid4().hex, 0.0
    moments = random.Random(7)
    for _ in range(30):
        run = subprocess.Popen(
            [*cluster_runs.launcher, *cluster_runs.command(LONG, "-q")],
            env={**cluster_runs.variables, MARK: mark},
            cwd=cluster_runs.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.5, 12.0))
        for pid, command in marked(mark).items():
            if "-m pytest" in command and "salloc" not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        while left := marked(mark):
            assert time.monotonic() - killed_s < GONE_S, left
            time.sleep(0.02)
        worst_s = max(worst_s, time.monotonic() - killed_s)
        run.wait(30)
    print(f"nothing was left after {worst_s:.2f} s")
    done = cluster_runs.run(LONG.replace("600", "0"))
    assert "1 passed" in done.stdout, done.stdout + done.stderr
