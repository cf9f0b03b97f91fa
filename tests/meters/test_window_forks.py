# SPDX-License-Identifier: Apache-2.0
"""Forks while meters are open: the parent keeps its energy, and the child has a reason."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.nvml import FORK_MESSAGE
from pytest_llenergy.meters.window_meters import FORKED as NO_READER

from ..nvml_sim import Board, World
from .waves import MS

pytestmark = pytest.mark.clock


#: First argument: how the child leaves the block. A child that continues prints a line before the parent's.
MEASURED = """
import json, os, sys, time
from pytest_llenergy.meters import measure

def describe(window):
    found = window.record
    return [found.start_s, found.duration_s, found.energy_j, found.energy_u_j, found.reason]

with measure(**json.loads(sys.argv[2])) as energy:
    with energy.window("work") as window:
        # Work before the fork.
        time.sleep(0.3)
        child = os.fork()
        if not child and sys.argv[1] == "exit":
            sys.exit(7)
        if not child and sys.argv[1] == "raise":
            raise KeyError("of the child")
        if not child and sys.argv[1] == "at once":
            os._exit(7)
        # Work after it, in the parent or in both.
        time.sleep(0.3)
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if child:
    print(json.dumps({"status": status, "work": describe(window), "total": describe(energy.total)}))
else:
    print(json.dumps({"work": describe(window), "total": describe(energy.total)}), flush=True)
"""

SESSION = """
import os, sys
from pytest_llenergy.devices.nvml import Quantity, Session

session = Session()
board = session.open_board(sys.argv[1])
quantities = [Quantity("nvmlDeviceGetPowerUsage"), Quantity("NVML_FI_DEV_POWER_INSTANT", field=(186, 0))]
child = os.fork()
if child:
    os.waitpid(child, 0)
for each in quantities:
    print(session.read(board.handle, [each])[0], flush=True)
session.close()
"""


def run(script: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[list[str], str]:
    """Run a script for at most a minute; return its lines, the child's first, and its stderr."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**kept, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, complaints = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            # Kill the child as well: it would hang forever and keep the pipes open.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, complaints
    return printed.splitlines(), complaints


@pytest.fixture
def on_board(tmp_path: Path, nvml_library: Path) -> Callable[..., tuple[World, dict[str, str]]]:
    """Return a function that creates a board with slow calls, so that forks often interrupt one."""

    def make(latch_ns: int = 50 * MS) -> tuple[World, dict[str, str]]:
        board = Board(power_w=100.0, latch_ns=latch_ns, call_delay_ns=4 * MS)
        world = World(tmp_path / "world", [board])
        return world, world.environment(nvml_library.parent)

    return make


def check_fork(world: World, reported: Any) -> None:
    start_s, duration_s, energy_j, energy_u_j, reason = reported
    assert energy_j is not None, reason
    true_j = world.true_energy_j(0, round(start_s * 1e9), round((start_s + duration_s) * 1e9))
    assert abs(energy_j - true_j) <= 4 * energy_u_j
    assert energy_u_j < 0.25 * energy_j


@pytest.mark.parametrize(("how", "status"), [("at once", 7), ("exit", 7), ("raise", 1)])
def test_a_forked_child_may_end_in_any_way_and_the_parent_keeps_its_energy(
    on_board: Callable[..., tuple[World, dict[str, str]]], how: str, status: int
) -> None:
    world, environment = on_board()
    (line,), complaints = run(MEASURED, how, "{}", environment=environment)
    parent = json.loads(line)
    assert parent["status"] == status
    assert ("KeyError: 'of the child'" in complaints) is (how == "raise")
    check_fork(world, parent["work"])
    check_fork(world, parent["total"])


@pytest.mark.parametrize("latch_ns", [50 * MS, 0])
def test_a_forked_child_that_continues_has_a_reason_instead_of_energy(
    on_board: Callable[..., tuple[World, dict[str, str]]], latch_ns: int
) -> None:
    world, environment = on_board(latch_ns)
    lines, _ = run(MEASURED, "go on", "{}", environment=environment)
    child, parent = map(json.loads, lines)
    for _, _, energy_j, _, reason in (child["work"], child["total"]):
        assert energy_j is None
        assert reason == NO_READER
    assert parent["status"] == 0
    check_fork(world, parent["work"])


@pytest.mark.parametrize("how", ["exit", "go on"])
def test_a_forked_child_does_not_end_the_power_meter_of_the_parent(how: str) -> None:
    # A power meter as a program: a line every 10 ms.
    program = "import time\nwhile True:\n    print(20.0, flush=True)\n    time.sleep(0.01)"
    meter = f"command:{shlex.join([sys.executable, '-c', program])}"
    lines, _ = run(MEASURED, how, json.dumps({"gpus": [], "meters": [meter]}))
    for each in ("work", "total"):
        _, duration_s, energy_j, energy_u_j, reason = json.loads(lines[-1])[each]
        assert energy_j is not None, reason
        assert abs(energy_j - 20 * duration_s) <= 4 * energy_u_j


def test_an_nvml_session_fails_in_a_forked_child_and_works_in_the_parent(
    on_board: Callable[..., tuple[World, dict[str, str]]],
) -> None:
    world, environment = on_board()
    lines, _ = run(SESSION, world.board(0).uuid, environment=environment)
    assert lines == [FORK_MESSAGE, FORK_MESSAGE, "100.0", "100.0"]
