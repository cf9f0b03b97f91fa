# SPDX-License-Identifier: Apache-2.0
"""A driver that hangs while a script is measured: the script still ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim import Board, World
from .waves import MS

pytestmark = pytest.mark.clock

#: How long each call of the driver hangs: longer than the test waits for the script.
HANGS_NS = 300_000 * MS

SCRIPT = """
import json, sys, time
from pytest_llenergy.energy import measure, sampler

def describe(window):
    found = window.record
    return {"energy_j": found.energy_j, "u_j": found.energy_u_j, "start_s": window.start_s,
            "duration_s": window.duration_s, "reason": window.reason,
            "flags": [flag.name for flag in window.flags]}

raised = None
try:
    with measure() as energy:
        with energy.window("before") as before:
            time.sleep(0.3)
        time.sleep(0.3)
        print("measuring", flush=True)
        sys.stdin.readline()
        # Each window waits this long for the driver, which will not answer.
        assert sampler.READING_TIMEOUT_S == 5.0
        sampler.READING_TIMEOUT_S = 0.5
        with energy.window("while it hangs") as hanging:
            time.sleep(0.1)
        if sys.argv[1] == "raise":
            raise ZeroDivisionError("of the work")
except ZeroDivisionError as error:
    raised = str(error)
windows = {"before": before, "while it hangs": hanging, "total": energy.total}
print(json.dumps({"raised": raised} | {name: describe(window) for name, window in windows.items()}))
"""


@pytest.fixture
def run_hanging(tmp_path: Path, nvml_library: Path) -> Callable[..., tuple[World, dict[str, Any]]]:
    """Return a function that runs the script and makes the driver hang once the script measures."""

    def run(how: str, latch_ns: int = 20 * MS) -> tuple[World, dict[str, Any]]:
        world = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=latch_ns)])
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how],
            env={**kept, **world.environment(nvml_library.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "measuring\n"
                world.update(0, call_delay_ns=HANGS_NS)
                # Wait until the background reader is the thread that hangs in a call: the next one, or else
                # the last one, if it began after the update.
                calls, end_s = world.calls(0), time.monotonic() + 5
                while world.calls(0) == calls and time.monotonic() < end_s:
                    time.sleep(0.01)
                printed, _ = process.communicate("\n", timeout=60)
            finally:
                process.kill()
        assert process.returncode == 0
        return world, json.loads(printed)

    return run


@pytest.mark.parametrize("latch_ns", [20 * MS, 0])
def test_windows_end_with_a_reason_when_the_driver_hangs(
    run_hanging: Callable[..., tuple[World, dict[str, Any]]], latch_ns: int
) -> None:
    world, windows = run_hanging("end", latch_ns)
    for name in ("while it hangs", "total"):
        window = windows[name]
        assert window["energy_j"] is None
        assert window["reason"].startswith("nvml: ")
        assert world.board(0).uuid in window["reason"]
        assert window["flags"][0] == "unmeasured"


def test_windows_measured_before_the_driver_hangs_keep_their_energy(
    run_hanging: Callable[..., tuple[World, dict[str, Any]]],
) -> None:
    world, windows = run_hanging("end")
    before = windows["before"]
    start_ns, end_ns = before["start_s"] * 1e9, (before["start_s"] + before["duration_s"]) * 1e9
    assert before["energy_j"] is not None, before["reason"]
    true_j = world.true_energy_j(0, round(start_ns), round(end_ns))
    assert abs(before["energy_j"] - true_j) <= 4 * before["u_j"]


def test_an_exception_of_the_measured_code_is_raised_when_the_driver_hangs(
    run_hanging: Callable[..., tuple[World, dict[str, Any]]],
) -> None:
    _, windows = run_hanging("raise")
    assert windows["raised"] == "of the work"
    assert windows["total"]["energy_j"] is None
