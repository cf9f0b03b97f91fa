# SPDX-License-Identifier: Apache-2.0
"""Leases of devices between processes, on simulated boards."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

import pytest

from tests.nvml_sim import Board, World
from tests.nvml_sim.boards import Process

from .conftest import GiveBoards
from .project import Project, wait_for

#: Writes what it leases, and holds it until a file exists.
HOLD = """
import os, pathlib, time
import pytest

def hold(name, leased):
    pathlib.Path(name + ".tmp").write_text(leased)
    pathlib.Path(name + ".tmp").rename(name + ".has")
    while not pathlib.Path(name + ".go").exists():
        time.sleep(0.02)
    pathlib.Path(name + ".left").touch()

@pytest.mark.gpus(1)
def test_one(gpus): hold(os.environ["NAME"], gpus.visible_devices)

@pytest.mark.gpus(2)
def test_two(gpus): hold(os.environ["NAME"], gpus.visible_devices)

def test_cpu(energy_meter):
    with energy_meter("w"):
        hold(os.environ["NAME"], "cpu")

@pytest.mark.gpus(1)
def test_rank(workers):
    name = os.environ["NAME"]
    workers.run(lambda: hold(name, os.environ["CUDA_VISIBLE_DEVICES"]))
"""


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    project.without_torch()
    project.write("test_hold.py", HOLD)
    return give_boards(project, [Board(name="NVIDIA H200"), Board(name="NVIDIA L40S")])


def hold(project: Project, name: str, test: str, *args: str) -> Any:
    """Start a run that holds what ``test`` leases until the file NAME.go exists."""
    return project.start_pytest(f"test_hold.py::{test}", "-rs", *args, NAME=name)


def go(project: Project, name: str) -> None:
    (project.path / f"{name}.go").touch()


def finish(process: Any, ret: int = 0) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == ret, out + err
    return f"{out}\n{err}"


def test_two_runs_have_different_boards_at_the_same_time(project: Project, world: World) -> None:
    """Held by pytest or by its ranks."""
    both = [hold(project, name, test) for name, test in (("a", "test_one"), ("b", "test_rank"))]
    wait_for(lambda: project.exists("a.has", "b.has"))
    leased = {project.text("a.has"), project.text("b.has")}
    assert leased == {world.board(0).uuid, world.board(1).uuid}
    for name, process in zip("ab", both, strict=True):
        go(project, name)
        finish(process)


@pytest.mark.parametrize(("first", "second"), [("test_two", "test_one"), ("test_cpu", "test_cpu")])
def test_a_lease_is_exclusive_and_the_next_waits(
    project: Project, world: World, first: str, second: str
) -> None:
    holder = hold(project, "a", first)
    wait_for(lambda: project.exists("a.has"))
    waiting = hold(project, "b", second)
    go(project, "b")
    # It says who it waits for.
    assert waiting.stdout is not None
    said = ""
    while not re.search(rf"process {holder.pid}\b", said):
        line = waiting.stdout.readline()
        assert line, said
        said += line
    assert not project.exists("b.has")
    go(project, "a")
    finish(holder)
    finish(waiting)
    assert project.exists("b.has")


def test_a_wait_that_is_too_long_names_the_holder(project: Project, world: World) -> None:
    holder = hold(project, "a", "test_two")
    wait_for(lambda: project.exists("a.has"))
    said = finish(hold(project, "b", "test_one", "--energy-lease-timeout=0.5"), ret=1)
    assert not project.exists("b.has")
    assert re.search(rf"process {holder.pid}\b", said)
    assert "--energy-lease-timeout" in said
    assert "test_two" in said
    go(project, "a")
    finish(holder)


def test_a_lease_ends_with_kill_9(project: Project, world: World) -> None:
    """Whether pytest or a rank of it uses the board."""
    holders = [hold(project, "a", "test_one"), hold(project, "b", "test_rank")]
    wait_for(lambda: project.exists("a.has", "b.has"))
    for holder in holders:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    go(project, "c")
    finish(hold(project, "c", "test_two", "--energy-lease-timeout=60"))
    assert project.exists("c.left")


VISIBLE = """
import pytest

@pytest.mark.gpus(1, isolate=False)
def test_one(gpus):
    print("leased", gpus.indices)

@pytest.mark.gpus(2, isolate=False)
def test_two(gpus):
    print("leased", gpus.indices)
"""


def test_the_environment_says_which_boards_may_be_used(project: Project, world: World) -> None:
    project.write("test_v.py", VISIBLE)
    for visible, options, one, two in (
        (None, [], "leased (0,)", "leased (0, 1)"),
        ("1", [], "leased (1,)", "skipped"),
        ("", [], "skipped", "skipped"),
        ("", ["--energy-gpus=all"], "leased (0,)", "leased (0, 1)"),
        ("0", ["--energy-gpus=1"], "leased (1,)", "skipped"),
        ("7", [], "skipped", "skipped"),
        (world.board(1).uuid, [], "leased (1,)", "skipped"),
    ):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        # Indices are ambiguous without it, where boards differ.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        ended = project.pytest("test_v.py", "-rsP", *options, **env)
        found = re.findall(r"leased \(.*\)", ended.out)
        assert found == [each for each in (one, two) if each != "skipped"]
        assert ended.counts.get("skipped", 0) == [one, two].count("skipped")
        if "skipped" in (one, two):
            assert "CUDA_VISIBLE_DEVICES" in ended.out or "--energy-gpus" in ended.out


def test_hidden_boards_are_mentioned(project: Project, world: World) -> None:
    project.write("test_e.py", "def test_it(energy): energy(sum, range(100_000))\n")
    ended = project.pytest("test_e.py", "--energy-meter=estimate", CUDA_VISIBLE_DEVICES="7")
    (line,) = re.findall(r"GPUs are not measured: .*", ended.text.replace("\n", " "))
    hidden = "GPUs are not measured: CUDA_VISIBLE_DEVICES='7' hides all 2"
    assert line.startswith(hidden), ended.out
    assert hidden in project.llenergy("run", "--", sys.executable, "-c", "1", CUDA_VISIBLE_DEVICES="7").err


def test_a_test_does_not_run_on_a_board_that_somebody_else_uses(project: Project, world: World) -> None:
    for index in range(2):
        world.update(index, processes=(Process(os.getpid()),))
    project.write(
        "test_b.py",
        "import pytest\npytestmark = pytest.mark.gpus(1)\ndef test_it(energy_meter):\n"
        "    with energy_meter('w'): raise SystemExit('ran')\n"
        "def test_plain(): raise SystemExit('ran')\n",
    )
    for busy, ret, status in (("fail", 1, "failed"), ("skip", 0, "skipped")):
        options = [f"--energy-busy={busy}", "--energy-lease-timeout=0.3", "--energy-report"]
        ended = project.pytest("test_b.py", "-rs", *options)
        ended.check(**({"error": 2} if ret else {"skipped": 2}))
        assert "SystemExit" not in ended.out
        assert re.search(rf"\b{os.getpid()}\b", ended.text)
        assert ended.ret == ret
        (record,) = project.records().values()
        assert record["status"] == status


@pytest.mark.slow
def test_a_driver_that_never_answers_ends_in_one_line(project: Project, world: World) -> None:
    world.update(0, call_delay_ns=3_600_000_000_000)
    project.write("test_v.py", VISIBLE + "def test_cpu(energy): energy(sum, range(1000))\n")
    meter = ("--energy-report", project.meter())
    ended = project.run(sys.executable, "-m", "pytest", "test_v.py", *meter, timeout_s=90)
    assert ended.ret == 1
    assert "the GPU driver has not answered for 30 s; see nvidia-smi" in ended.text
    ended.check(passed=1, error=2)
    assert not project.survivors()


def test_a_board_that_fails_is_named_and_leaves_the_others(project: Project, world: World) -> None:
    world.update(1, no_permission=True)
    project.write("test_v.py", VISIBLE + "def test_cpu(energy): energy(sum, range(1000))\n")
    ended = project.pytest("test_v.py", "-k", "one or cpu", "-rsP", "--energy-report", project.meter())
    ended.check(passed=2)
    assert "leased (0,)" in ended.out
    doctor = project.llenergy("doctor", "--no-steps")
    run = project.llenergy("run", "--", sys.executable, "-c", "pass")
    assert run.ret == 0, run.text
    for each in (ended, doctor, run):
        assert "NVML: GPU 1 does not answer (Insufficient Permissions); see nvidia-smi" in each.text
    world.update(1, no_permission=False)
    world.update(0, lost=True)
    ended = project.pytest("test_v.py", "-k", "one", "-rsP").check(passed=1)
    assert "leased (1,)" in ended.out


def test_doctor_lists_boards_and_backends_and_exits_0_or_1(project: Project, world: World) -> None:
    assert "llama-cpp" in project.llenergy("doctor", "--backends").out
    shown = project.llenergy("doctor", "--no-steps")
    assert shown.ret in (0, 1)
    assert "Traceback" not in shown.text
    assert "H200" in shown.out
    assert "L40S" in shown.out
    loaded = json.loads(project.llenergy("doctor", "--no-steps", "--format=json").out)
    assert world.board(0).uuid in json.dumps(loaded)
