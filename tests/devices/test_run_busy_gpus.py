# SPDX-License-Identifier: Apache-2.0
"""A leased board that is busy: the test waits, then fails or is skipped as configured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.boards import GIB
from ..nvml_sim.fixtures import Give
from .test_run_gpus import BACKEND, CONFTEST

Read = Callable[..., dict[str, Any]]

ONE = """
import pytest
@pytest.mark.gpus(1)
def test_it(energy, backend):
    energy(backend.generate, ["a"])
"""

ADVICE = "; end it, or choose other GPUs with --energy-gpus"


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(uuid="GPU-a"), Board(uuid="GPU-b")]))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\n"
        "energy_backend = sleepy\nenergy_lease_timeout = 0.2\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(BACKEND)
    pytester.makepyfile(ONE)
    return pytester.runpytest_subprocess("--energy-report", "-rs", "-p", "no:cacheprovider", *args)


def occupy(world: World, *boards: int) -> None:
    for index in boards:
        world.update(index, memory_used=12 * GIB)


@pytest.mark.parametrize(
    "args", [pytest.param([], id="alone"), pytest.param(["-n2"], id="xdist", marks=pytest.mark.slow)]
)
def test_a_busy_board_fails_the_test(
    pytester: pytest.Pytester, world: World, read_report: Read, args: list[str]
) -> None:
    occupy(world, 0, 1)
    run(pytester, *args).assert_outcomes(errors=1)
    (record,) = read_report()["records"]
    held = "12 GiB in use by no process that is visible from here"
    assert record["status"] == "failed"
    pattern = (
        re.escape(f"Failed: DeviceError: GPU-a: busy with {held}, waited ")
        + r"\d+(\.\d)? s"
        + re.escape(ADVICE)
    )
    assert re.fullmatch(pattern, record["reason"])


@pytest.mark.parametrize(
    "args", [pytest.param([], id="alone"), pytest.param(["-n2"], id="xdist", marks=pytest.mark.slow)]
)
def test_a_busy_board_skips_the_test_if_configured(
    pytester: pytest.Pytester, world: World, read_report: Read, args: list[str]
) -> None:
    occupy(world, 0, 1)
    run(pytester, "--energy-busy=skip", *args).assert_outcomes(skipped=1)
    assert "GPU-a: busy with 12 GiB in use by no process " in str(read_report()["records"][0]["reason"])


def test_unknown_processes_are_a_flag_not_a_failure(
    pytester: pytest.Pytester, world: World, read_report: Read
) -> None:
    world.update(0, processes_supported=False)
    run(pytester).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    (flag,) = (flag for flag in record["flags"] if flag["name"] == "gpu-processes")
    assert flag["severity"] == "warning"
    assert "the driver does not report the processes on the board" in flag["detail"]
