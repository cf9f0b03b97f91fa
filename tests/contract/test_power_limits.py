# SPDX-License-Identifier: Apache-2.0
"""A changed power limit is put back whatever is killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.nvml_sim import Board, World

from .conftest import GiveBoards
from .project import Project, wait_for

ENDLESS = """
import pathlib, time
import pytest

@pytest.mark.gpus(1)
@pytest.mark.gpu_settings(power_limit_w=300)
def test_it(workers):
    workers.run(lambda: 1)
    pathlib.Path("begun").touch()
    {body}
"""

NEXT = "import pytest\n@pytest.mark.gpus(1)\ndef test_next(gpus): pass\n"


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    project.without_torch()
    project.write("test_next.py", NEXT)
    return give_boards(project, [Board(name="NVIDIA H200")])


def start(project: Project, world: World) -> int:
    """Start a run that is in its test, with another power limit. Returns its process."""
    project.write("test_endless.py", ENDLESS.format(body="time.sleep(600)"))
    process = project.start_pytest("test_endless.py")
    wait_for(lambda: project.exists("begun"))
    assert world.board(0).power_limit_w == 300
    return process.pid


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    # None may do anything about the others' end.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, number)


def test_it_is_put_back_after_any_end_of_the_test(project: Project, world: World) -> None:
    for body in ("raise ValueError", "raise KeyboardInterrupt", "pytest.exit('enough')"):
        project.write("test_endless.py", ENDLESS.format(body=body))
        project.pytest("test_endless.py")
        assert project.exists("begun")
        assert world.board(0).power_limit_w == 700


def test_it_is_put_back_when_pytest_is_killed(project: Project, world: World) -> None:
    os.kill(start(project, world), signal.SIGKILL)
    wait_for(lambda: world.board(0).power_limit_w == 700)
    assert project.survivors() == {}


def test_the_next_lease_puts_it_back_when_everything_was_killed(project: Project, world: World) -> None:
    start(project, world)
    kill(list(project.processes()))
    assert project.survivors() == {}
    assert world.board(0).power_limit_w == 300
    told = project.llenergy("doctor", "--no-steps")
    assert world.board(0).uuid in told.out
    assert "300 W" in told.out
    project.pytest("test_next.py").check(passed=1)
    assert world.board(0).power_limit_w == 700


def test_a_limit_that_somebody_has_set_since_stays(project: Project, world: World) -> None:
    start(project, world)
    kill(list(project.processes()))
    assert project.survivors() == {}
    world.update(0, power_limit_w=450.0)
    project.pytest("test_next.py").check(passed=1)
    assert world.board(0).power_limit_w == 450


def test_without_the_rights_the_test_is_skipped_and_nothing_changes(project: Project, world: World) -> None:
    world.update(0, settings_denied=True)
    project.write("test_endless.py", ENDLESS.format(body="pass"))
    project.pytest("test_endless.py", "-rs").check(skipped=1)
    assert world.board(0).power_limit_w == 700
