# SPDX-License-Identifier: Apache-2.0
"""What ends in the middle of a run on two hosts: the record, the later tests, and what is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from pytest_llenergy.record.round_metric import is_valid

from .ray_cluster import RayNodes
from .runs import RUN_TIMEOUT_S, ClusterRuns, runs_on_ray

#: Within this time nothing of a run may be left (seconds).
GONE_S = 5.0

#: Names the processes of one run in the environment that they inherit.
MARK = "LLENERGY_TEST_MARK"

VICTIMS = """
import os, platform, signal, time
from pathlib import Path
import psutil, pytest

HERE = Path(__file__).parent

def victims(what):
    # An agent's parent is its guard, with the same command line.
    parents = psutil.Process().parents()
    agents = [each for each in parents if any("hosts.agent" in word for word in each.cmdline())]
    launcher = agents[-1].parent()
    if what == "raylet":
        # `ray start --block` would end the rest of its host.
        launcher.parent().parent().suspend()
        return [launcher.parent()]
    return {
        "rank": [psutil.Process()],
        "agent": agents[:1],
        "frozen": agents[:1],
        "slurmstepd": [launcher],
        "host": [launcher, *launcher.children(recursive=True)],
        "frozen host": [launcher, *launcher.children(recursive=True), *daemons(launcher)],
    }.get(what, [])

def daemons(launcher):
    # slurmd is no parent of slurmstepd.
    raylet = [each for each in [launcher.parent()] if "raylet" in each.name()]
    return raylet or [each for each in psutil.process_iter() if "slurmd -D -N n2" in " ".join(each.cmdline())]

def step(what):
    import torch.distributed as dist
    mine = HERE / f"rounds-{dist.get_rank()}"
    with mine.open("a") as file:
        file.write("x")
    time.sleep(0.3)
    if len(mine.read_text()) < 4:
        return
    if dist.get_rank() == 3:
        found = victims(what)
        (HERE / "began").write_text(repr(time.time()))
        # The process itself last.
        for each in sorted(found, key=lambda each: each.pid == os.getpid()):
            each.send_signal(signal.SIGSTOP if "frozen" in what else signal.SIGKILL)
    time.sleep(60)

@pytest.mark.gpus(4, per_host=2)
def test_before(workers):
    assert len(set(workers.run(os.getpid))) == 4

@pytest.mark.gpus(4, per_host=2)
def test_ended(workers, energy):
    try:
        energy(workers.call(step, WHAT))
    finally:
        (HERE / "ended").write_text(repr(time.time()))

def test_journal():
    (journal,) = HERE.glob("*.journal.jsonl")
    (HERE / "journal").write_text(journal.read_text())

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


def marked(mark: str, part: str = "pytest") -> dict[int, str]:
    """Return pid and command of the processes with the mark in their environment, and this in the command."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes() and part in command:
                found[int(each.name)] = command
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rank", "was killed by SIGKILL"),
        ("agent", "its agent has closed its connection"),
        ("frozen", "its agent has not answered for 3 s"),
        ("host", "its agent has closed its connection"),
        ("frozen host", "its agent has not answered for 3 s"),
        ("slurmstepd", "its agent has closed its connection"),
        # Ends the agents of all hosts, or the process that could start others.
        ("launcher", "its agent has closed its connection"),
    ],
)
def test_the_rounds_before_a_failure_are_kept_and_the_run_goes_on(
    cluster_runs: ClusterRuns, what: str, message: str
) -> None:
    if what == "slurmstepd" and cluster_runs.name != "slurm":
        pytest.skip("Slurm only")
    check_failure(cluster_runs, what, message)
    # The devices are free on both hosts.
    again = cluster_runs.run(LONG.replace("600", "0"))
    assert "1 passed" in again.stdout, again.stdout + again.stderr


@pytest.mark.slow
def test_a_raylet_ends(tmp_path: Path, nvml_library: Path) -> None:
    nodes = RayNodes(tmp_path, nvml_library)
    try:
        for name in (None, "nodeb"):
            nodes.add(name, 4)
        directory = tmp_path / "run"
        directory.mkdir()
        runs = runs_on_ray(nodes, directory)
        check_failure(runs, "raylet", "its agent has closed its connection")
        for host in nodes.hosts:
            host.wait_until_free(GONE_S)
        # Another host takes its place.
        nodes.add("nodec", 4)
        again = runs.run(LONG.replace("600", "0"))
        assert "1 passed" in again.stdout, again.stdout + again.stderr
    finally:
        thaw()
        nodes.stop()


def check_failure(cluster_runs: ClusterRuns, what: str, message: str) -> None:
    """End something in the fourth round of a run; check the record, the later tests, and what is left.

    Args:
        cluster_runs: The cluster.
        what: What ends.
        message: Regular expression of the reason.
    """
    is_of_launcher = what == "launcher"
    mark, here = uuid.uuid4().hex, cluster_runs.directory
    source = VICTIMS.replace("WHAT", repr(what))
    options = ["--energy-rounds=6", "--energy-warmup=0", "--energy-budget=1", "-q"]
    with subprocess.Popen(
        [*cluster_runs.launcher, *cluster_runs.command(source, *options)],
        env={**cluster_runs.variables, MARK: mark},
        cwd=here,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        if is_of_launcher:
            name = "srun " if cluster_runs.name == "slurm" else "ray_client"
            kill_launcher(mark, here, name)
        output, _ = run.communicate(timeout=RUN_TIMEOUT_S)
    if what == "frozen host":
        thaw()
    gone_s = wait_until_gone(mark)
    took_s = float((here / "ended").read_text()) - float((here / "began").read_text())
    records = {each.id.partition("::")[2]: each for each in cluster_runs.report.records}
    ended = records["test_ended"]
    statuses = [(name, each.status, each.reason) for name, each in records.items()]
    rounds = [(round_.energy_j, [flag.name for flag in round_.flags]) for round_ in ended.rounds]
    print(f"{cluster_runs.name}, {what}: {took_s:.2f} s; gone after {gone_s:.2f} s; {statuses}; {rounds}")
    assert took_s < GONE_S, output
    assert ended.status == "failed", output
    journal = (here / "journal").read_text().splitlines()
    assert [each for each in map(msgspec.json.decode, journal) if each.get("id") == ended.id] == [
        msgspec.to_builtins(ended)
    ]
    *finished, last = ended.rounds
    assert [is_valid(each) and len(each.by_domain) == 4 for each in finished] == [True] * 3
    assert all((each.energy_j or 0.0) > 0 for each in finished)
    assert "unfinished" in [flag.name for flag in last.flags if flag.severity == "invalid"]
    assert re.search(message, ended.reason or ""), output
    joules = {name: each.energy_j for name, each in last.by_domain.items()}
    assert len(joules) == 4
    if what == "rank":
        assert all((each or 0.0) > 0 for each in joules.values())
    else:
        lost = [each.name for each in cluster_runs.hosts][0 if is_of_launcher else 1 :]
        assert {name for name, each in joules.items() if each is None} == {
            name for name in joules if name.partition("/")[0] in lost
        }
        assert (last.energy_j, re.search(message, last.reason or "") is not None) == (None, True)
    if what == "rank" or is_of_launcher:
        assert "1 failed, 4 passed" in output, output
    else:
        assert "1 failed, 3 passed, 1 skipped" in output, output
        assert f"{lost[0]}: its agent" in output.partition("SKIPPED")[2]


def kill_launcher(mark: str, directory: Path, name: str) -> None:
    """Kill the process of the launcher on pytest's host in the fourth round."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while not (directory / "rounds-3").exists() or len((directory / "rounds-3").read_text()) < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.4)
    (directory / "began").write_text(repr(time.time()))
    # srun has two. The second one ends the step.
    os.kill(min(marked(mark, name)), signal.SIGKILL)


def thaw() -> None:
    """Let all stopped processes of the cluster run again, also Slurm's and Ray's, which are not marked."""
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.status() == psutil.STATUS_STOPPED:
                each.send_signal(signal.SIGCONT)


def wait_until_gone(mark: str) -> float:
    """Wait until no process of the package with a mark is left. Returns the seconds that it took."""
    begin_s = time.monotonic()
    while left := marked(mark):
        if time.monotonic() - begin_s >= GONE_S:
            pytest.fail(str({pid: (psutil.Process(pid).status(), text[-200:]) for pid, text in left.items()}))
        time.sleep(0.02)
    return time.monotonic() - begin_s


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
