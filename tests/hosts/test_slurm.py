# SPDX-License-Identifier: Apache-2.0
"""Agents in a real Slurm of two nodes: their start, what they see, and what remains when something ends."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from pytest_llenergy.errors import PlanError
from pytest_llenergy.hosts.slurm import AGENTS_TIMEOUT_S, SlurmCluster, clean_environment

from .agents import SHIFT_S
from .slurm import GPUS, NODES, Slurm

#: Runs in the allocation as pytest would.
START = """
import json, os, select, time
from pytest_llenergy.hosts import slurm
from pytest_llenergy.hosts.launchers import NeverError, Shape
from pytest_llenergy.errors import WorkerError

def boards(host):
    return [board.uuid for board in host.call("ranks.inventory", 60.0)[0]]

def out(value):
    print(json.dumps(value), flush=True)

cluster = slurm.SlurmCluster(os.environ)
"""
GANG = """
began = time.monotonic()
gang = cluster.gang(Shape(2, 4), 0.0, print)
took = time.monotonic() - began
"""

slow = pytest.mark.slow

#: Names the processes of one test in the environment that they inherit.
MARK = "LLENERGY_TEST_MARK"


ALL_GPUS = [f"--gres=gpu:{GPUS}"]


def in_job(slurm: Slurm, code: str, *options: str, step: bool = False) -> list[Any]:
    """Run a script in an allocation, or in a step of one; return what it prints, a JSON value per line."""
    job = ["salloc", "--quiet", "--nodes=2", *options]
    inside = ["srun", "--nodes=1", "--ntasks=1"] if step else []
    done = slurm.run(*job, *inside, sys.executable, "-c", START + code, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def processes(mark: str) -> dict[int, str]:
    """Return pid and command of each process whose environment contains the mark."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes():
                found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@contextmanager
def running(slurm: Slurm, code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a script in an allocation that outlives it; yield ``salloc`` and the mark of all processes."""
    mark = uuid.uuid4().hex
    # The shell keeps the allocation, so that only the end of the script can end the step.
    shell = ["sh", "-c", '"$@" & echo $!; wait $!; sleep 60', "sh", sys.executable, "-c", START + code]
    process = subprocess.Popen(
        ["salloc", "--quiet", f"--job-name={mark}", "--nodes=2", *ALL_GPUS, *shell],
        env={**slurm.environment, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        slurm.run("scancel", f"--name={mark}")
        for pid in processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("step", [False, True], ids=["job", "step"])
def test_an_agent_on_each_node_sees_the_gpus_of_the_job(slurm_cluster: Slurm, step: bool) -> None:
    """In a step, variables and GPUs of the step must not limit the agents."""
    code = """
for each in gang.hosts:
    out([each.name, each.facts.host, boards(each), each.exchange(8).offset_ns / 1e9])
out(took)
gang.close()
out(gang.lost())
"""
    *hosts, took, lost = in_job(slurm_cluster, GANG + code, *ALL_GPUS, step=step)
    expected = [
        [name, host, [world.board(number).uuid for number in range(GPUS)], pytest.approx(shift_s, abs=0.1)]
        for (name, world), host, shift_s in zip(
            slurm_cluster.worlds.items(), (platform.node(), "n2"), (0, SHIFT_S), strict=True
        )
    ]
    assert hosts == expected
    assert set(lost) == set(NODES)
    print(f"agents started in {took:.3f} s")


def test_a_gang_that_only_another_job_can_have(slurm_cluster: Slurm) -> None:
    code = """
lost = {"n1": "n1: its agent has ended"}
out([[offer.name, offer.devices] for offer in cluster.offers()])
for shape, avoid in (Shape(2, 3), {}), (Shape(1, 5), {}), (Shape(2, 3), lost), (Shape(1, 1), lost):
    try:
        cluster.gang(shape, 0.0, print, avoid)
    except NeverError as error:
        out(str(error))
"""
    offers, larger, never, larger_before, left = in_job(
        slurm_cluster, code, "--nodes=1", "--gres=gpu:2", "--partition=gpu"
    )
    assert offers == [["n1", 2]]
    assert larger.endswith(" cannot provide 2 hosts with 3 GPUs each: n1 has 2")
    assert never.endswith(" cannot provide 1 host with 5 GPUs: n1 has 2")
    assert larger_before.endswith(": n1 has 2; not used: n1: its agent has ended")
    assert left.endswith(" cannot provide 1 host with 1 GPU: n1 has 2; not used: n1: its agent has ended")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("slurm.agent_command = lambda slot: ['/no/python']", "/no/python: No such file or directory"),
        pytest.param("cluster._job = '999999'", "Invalid job id specified", marks=slow),
        pytest.param(
            "slurm.agent_command = lambda slot: ['sh', '-c', 'test $SLURM_PROCID = 0 && sleep 60']",
            "n2: task 1: Exited with exit code 1",
            marks=slow,
        ),
        pytest.param(
            "slurm.AGENTS_TIMEOUT_S = 1; slurm.agent_command = lambda slot: ['sh', '-c', 'echo hm; sleep 9']",
            "no connection within 1 s; srun printed: ",
            marks=slow,
        ),
    ],
    ids=["no-python", "job-ended", "one-task", "late"],
)
def test_agents_that_do_not_start(slurm_cluster: Slurm, before: str, message: str) -> None:
    code = f"""
{before}
began = time.monotonic()
try:
    cluster.gang(Shape(2, 4), 0.0, print)
except WorkerError as error:
    out([str(error), time.monotonic() - began])
"""
    ((text, took),) = in_job(slurm_cluster, code, *ALL_GPUS)
    assert message in text
    assert "\n" not in text
    assert took < 30


def test_outside_of_slurm() -> None:
    with pytest.raises(PlanError, match=r"^SLURM_JOB_ID is not set; run this inside a Slurm job, "):
        SlurmCluster({"PATH": "/usr/bin"})
    with pytest.raises(PlanError, match=r"^srun is not on PATH in Slurm job 7; "):
        SlurmCluster({"PATH": "/no/such/directory", "SLURM_JOB_ID": "7"})


#: Runs in each task of a job array while all tasks run.
TASK = """
def meet(what):
    open(f"{os.environ['SLURM_ARRAY_TASK_ID']}.{what}", "w").close()
    while len([each for each in os.listdir() if each.endswith(what)]) < 2:
        time.sleep(0.02)

meet("began")
try:
    found = [[each.name, each.devices] for each in slurm.SlurmCluster(os.environ).offers()]
except Exception as error:
    found = str(error)
has_number_of_array = os.environ["SLURM_JOB_ID"] == os.environ["SLURM_ARRAY_JOB_ID"]
out([has_number_of_array, found, os.environ["SLURMD_NODENAME"]])
meet("ended")
"""


def test_each_task_of_a_job_array_has_its_own_nodes(slurm_cluster: Slurm, tmp_path: Path) -> None:
    """Slurm describes all tasks when asked for the one whose number is that of the array."""
    program = tmp_path / "task.py"
    program.write_text(START.replace("cluster = slurm.SlurmCluster(os.environ)", "") + TASK)
    job = [f"--wrap={sys.executable} {program}", "--array=0-1", "--nodes=1", "--exclusive", *ALL_GPUS]
    slurm_cluster.run("sbatch", "--output=%a.out", *job, cwd=tmp_path)
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ended"))) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    found = sorted(json.loads((tmp_path / f"{task}.out").read_text()) for task in range(2))
    assert [whole for whole, _, _ in found] == [False, True]
    assert [offers for _, offers, _ in found] == [[[node, GPUS]] for _, _, node in found]


def test_variables_of_a_job_do_not_reach_srun() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "MY_SLURM_ID": "1"}
    assert clean_environment({**kept, "SLURM_NTASKS": "1", "SBATCH_GRES": "gpu:1", "SRUN_DEBUG": "3"}) == kept


def test_nothing_remains_when_pytest_is_killed(slurm_cluster: Slurm) -> None:
    with running(slurm_cluster, GANG + "out(os.getpid()); time.sleep(600)") as (process, mark):
        pytest_pid = read(process)
        assert read(process) == pytest_pid
        assert {task for pid in processes(mark) if (task := task_of(pid)) is not None} == {0, 1}
        os.kill(pytest_pid, signal.SIGKILL)
        print(f"gone after {wait_until_gone(mark):.3f} s")


@slow
def test_nothing_remains_when_pytest_is_killed_while_agents_start(slurm_cluster: Slurm) -> None:
    took = []
    for number in range(30):
        with running(slurm_cluster, GANG + "time.sleep(600)") as (process, mark):
            pytest_pid = read(process)
            time.sleep(Random(number).uniform(0.0, 1.0))
            os.kill(pytest_pid, signal.SIGKILL)
            took.append(wait_until_gone(mark))
    print(f"gone after {max(took):.3f} s at most")


@slow
@pytest.mark.parametrize("interrupted", [False, True], ids=["", "ctrl-c"])
def test_a_node_that_freezes_before_agents_start(
    slurm_cluster: Slurm, tmp_path: Path, interrupted: bool
) -> None:
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
out(None)
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.01)
try:
    cluster.gang(Shape(2, 4), 0.0, print)
except BaseException as error:
    out([type(error).__name__, str(error)])
"""
    with running(slurm_cluster, code) as (process, mark):
        pytest_pid, _ = read(process), read(process)
        with slurm_cluster.frozen_daemon():
            (tmp_path / "go").touch()
            began = time.monotonic()
            if interrupted:
                while not any(command.startswith("srun ") for command in processes(mark).values()):
                    time.sleep(0.01)
                time.sleep(1.0)
                began = time.monotonic()
                os.kill(pytest_pid, signal.SIGINT)
            kind, text = read(process)
            took = time.monotonic() - began
            wait_until_gone(mark)
            slurm_cluster.run("scancel", f"--name={mark}")
    print(f"{kind}: {text} after {took:.1f} s")
    assert took < (10 if interrupted else AGENTS_TIMEOUT_S + 20)
    if interrupted:
        assert kind == "KeyboardInterrupt"
    else:
        assert (kind, "n2" in text, "\n" in text) == ("WorkerError", True, False)


def wait_until_gone(mark: str) -> float:
    """Wait until only the shell of the allocation runs; return the time that it took (seconds)."""
    began = time.monotonic()
    while left := {pid: text for pid, text in processes(mark).items() if not is_of_allocation(text)}:
        # Five seconds are promised; other tests may run beside this one.
        assert time.monotonic() - began < 20, left
        time.sleep(0.005)
    return time.monotonic() - began


def is_of_allocation(command: str) -> bool:
    return command.startswith(("salloc ", "sh -c ", "sleep "))


def task_of(pid: int) -> int | None:
    """Return the number of the task that a process, an agent or its guard, belongs to."""
    with suppress(OSError):
        variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        for number in range(len(NODES)):
            if f"SLURM_PROCID={number}".encode() in variables and b"\0SLURM_PROCID\0" in command:
                return number
    return None


def find_victims(mark: str, what: str) -> list[int]:
    """Return a process of the second node, or the first one or both of ``srun``."""
    found = processes(mark)
    if "srun" in what:
        both = sorted(pid for pid, command in found.items() if command.startswith("srun "))
        return both[:1]
    guard = next(pid for pid in found if task_of(pid) == 1 and task_of(parent_of(pid)) is None)
    if what == "guard":
        return [guard]
    return [parent_of(guard) if what == "slurmstepd" else next(p for p in found if parent_of(p) == guard)]


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


@pytest.mark.parametrize(
    ("what", "number", "lost", "reason"),
    [
        (
            "agent",
            signal.SIGKILL,
            ["n2"],
            "n2: its agent has closed its connection",
        ),
        pytest.param("agent", signal.SIGSTOP, ["n2"], "n2: its agent has not answered for 3 s", marks=slow),
        pytest.param("guard", signal.SIGKILL, ["n2"], "n2: its agent has closed its connection", marks=slow),
        pytest.param("slurmstepd", signal.SIGKILL, ["n2"], "n2: its agent has closed its", marks=slow),
        pytest.param("srun", signal.SIGKILL, ["n1", "n2"], "n2: its agent has closed its", marks=slow),
    ],
    ids=["agent-killed", "agent-stopped", "guard", "slurmstepd", "srun"],
)
def test_a_host_is_lost(
    slurm_cluster: Slurm, what: str, number: signal.Signals, lost: list[str], reason: str
) -> None:
    """The other host still answers, and nothing remains."""
    code = f"""
out(None)
while gang.hosts[1].lost is None and time.monotonic() - began < 30:
    time.sleep(0.001)
out(time.monotonic())
while not gang.lost()["n2"].startswith({reason!r}) and time.monotonic() - began < 30:
    time.sleep(0.01)
time.sleep(0.5)
out([gang.lost(), [each.exchange(1).bound_ns for each in gang.hosts if each.lost is None]])
gang.close()
"""
    with running(slurm_cluster, GANG + code) as (process, mark):
        read(process)
        read(process)
        victims = find_victims(mark, what)
        began = time.monotonic()
        for victim in victims:
            os.kill(victim, number)
        noticed = read(process) - began
        reasons, answers = read(process)
        # With the time that closing the gang takes.
        gone = wait_until_gone(mark)
    print(f"{number.name} to {what}: noticed after {noticed:.3f} s, gone {gone:.3f} s later")
    assert list(reasons) == lost
    assert reasons["n2"].startswith(reason)
    assert len(answers) == len(NODES) - len(lost)
