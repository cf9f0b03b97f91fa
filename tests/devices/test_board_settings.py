# SPDX-License-Identifier: Apache-2.0
"""The mark ``gpu_settings``: power limits and clocks are changed for one test, and always put back.

The real pynvml changes simulated boards, whose state outlives every process.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pytest_llenergy.devices.board_settings import (
    Change,
    note_name,
    parse_settings,
    restore_left_changes,
)
from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.errors import DeviceError, PlanError
from pytest_llenergy.record.environment import read_boot_id

from ..nvml_sim.boards import MigInstance
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import Board, World
from .lockers import USERS, needs_root
from .test_run_gpus import BACKEND, CONFTEST

Read = Callable[..., dict[str, Any]]

#: Before any test.
FACTORY = (700.0, (0, 0))

#: Shows each test what the boards have, by real reads of another process.
SEEN = """
import pynvml
def seen(index=0):
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    return limit, pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_GRAPHICS)
"""

SWEEP = """
import pytest
from seen import seen
@pytest.mark.gpus(1)
@pytest.mark.gpu_settings(power_limit_w="watts", graphics_clock_mhz=(900, 1200))
@pytest.mark.parametrize("watts", [250, 400.5, None])
def test_it(energy, backend, watts):
    energy(backend.generate, ["a"])
    assert seen() == (watts or 700, 1200)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = sleepy\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(BACKEND.replace("time.sleep(0.5)", "time.sleep(0.2)"))
    (pytester.path / "seen.py").write_text(SEEN)
    return pytester


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    boards = [Board(name="NVIDIA H200", power_w=100, latch_ns=20_000_000)] * 2
    return nvml_children(World(tmp_path / "world", [*boards, Board(name="NVIDIA L4")]))


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("--energy-report", "-rs", "-p", "no:cacheprovider", *args)


def set_on(world: World, *indices: int) -> list[tuple[float, tuple[int, int]]]:
    """Return power limit and locked clocks of boards."""
    boards = map(world.board, indices or range(3))
    return [(board.power_limit_w, board.locked_clocks_mhz) for board in boards]


def files() -> list[str]:
    """Return the names of the files that note what was set before."""
    return [name for name in os.listdir(os.environ["LLENERGY_LOCK_DIR"]) if "settings" in name]  # noqa: PTH208


@pytest.mark.slow
def test_a_sweep_sets_each_value_and_puts_it_back(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    suite.makepyfile(SWEEP)
    before = world.changes(2)
    run(suite).assert_outcomes(passed=3)
    assert set_on(world) == [FACTORY] * 3
    assert world.changes(2) == before, "the third board was not leased"
    assert not files()
    records = read_report()["records"]
    settings = [record["gpu_settings"][0] for record in records]
    assert [each["uuid"] for each in settings] == [record["devices"][0] for record in records]
    assert [each["power_limit_w"] for each in settings] == [250, 400.5, None]
    assert [each["power_limit_found_w"] for each in settings] == [250, 400.5, None]
    assert [each["graphics_clock_mhz"] for each in settings] == [[900, 1200]] * 3
    assert [each["graphics_clock_found_mhz"] for each in settings] == [1200] * 3
    # The boards' own limit, by which boards of one kind are found.
    assert [record["boards"][0]["power_limit_w"] for record in records] == [700] * 3


@pytest.mark.slow
def test_a_board_without_settings_is_skipped_with_the_reason(suite: pytest.Pytester, world: World) -> None:
    for index in range(2):
        world.update(index, settings_supported=False)
    before = world.changes(0)
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpus(2)\n@pytest.mark.gpu_settings(graphics_clock_mhz=900)\n"
        "def test_it(gpus): pass\n"
    )
    result = run(suite)
    result.assert_outcomes(skipped=1)
    assert "or its driver does not support it" in " ".join(result.stdout.str().split())
    assert (world.changes(0), files()) == (before, [])


def test_mig_instances_and_the_cpu_are_refused(
    suite: pytest.Pytester, tmp_path: Path, nvml_children: Give
) -> None:
    parts = (
        MigInstance(uuid="MIG-a1a1a1a1-0000-4000-8000-000000000001", gpu_instance=1, compute_instance=0),
    )
    board = Board(name="NVIDIA H100", mig_enabled=True, mig_instances=parts)
    world = nvml_children(World(tmp_path / "divided", [board]))
    suite.makepyfile(
        """
        import pytest
        @pytest.mark.gpus(1)
        @pytest.mark.gpu_settings(power_limit_w=300)
        def test_instance(gpus): pass
        @pytest.mark.gpus(9, fallback="cpu")
        @pytest.mark.gpu_settings(power_limit_w=300)
        def test_fallback(gpus): pass
        """
    )
    result = run(suite)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        ["*a MIG instance has no power limit or clock of its own*", "*the test has leased the CPU, and only*"]
    )
    assert world.changes(0) == 0


@pytest.mark.parametrize("value", [0, -5, True, float("nan"), float("inf"), [250], b"250"])
def test_invalid_limits(value: object) -> None:
    with pytest.raises(PlanError, match="needs a number of watts such as 250"):
        parse_settings({"power_limit_w": value})


def is_guard(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "pytest_llenergy.devices.board_settings" in process.cmdline()
    return False


def kill_all(processes: list[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.suspend()
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, 30)


class TestNotes:
    """Which notes count, and what they do to a board of the next lease."""

    @pytest.fixture
    def directory(self, tmp_path: Path, nvml_attach: Callable[[World], object]) -> Iterator[LockDirectory]:
        self.world = World(tmp_path / "world", [Board(uuid="GPU-a", power_limit_w=300.0)])
        nvml_attach(self.world)
        with closing(open_lock_directory()) as directory:
            yield directory

    def leave(self, directory: LockDirectory, **change: Any) -> Path:
        path = directory.path / note_name("GPU-a")
        given: dict[str, Any] = {"boot_id": read_boot_id(), "before_mw": 700_000, "set_mw": 300_000}
        path.write_bytes(msgspec.json.encode(Change("GPU-a", **given | change)))
        return path

    def limit_after(self, directory: LockDirectory) -> float:
        restore_left_changes(directory, ["GPU-a"])
        return self.world.board(0).power_limit_w

    def test_a_note_ends_with_a_reboot(self, directory: LockDirectory) -> None:
        self.leave(directory, boot_id="00000000-0000-4000-8000-000000000000")
        assert self.limit_after(directory) == 300.0
        self.leave(directory)
        assert self.limit_after(directory) == 700.0

    @needs_root
    def test_notes_of_other_users_and_links_are_ignored(self, directory: LockDirectory) -> None:
        path = self.leave(directory)
        os.chown(path, USERS[0], -1)
        assert self.limit_after(directory) == 300.0
        target = self.leave(directory).rename(directory.path / "elsewhere")
        path.symlink_to(target)
        assert self.limit_after(directory) == 300.0

    def test_a_board_that_cannot_be_restored_is_an_error_that_says_what_to_do(
        self, directory: LockDirectory
    ) -> None:
        path = self.leave(directory, locks_clocks=True)
        self.world.update(0, settings_denied=True)
        with pytest.raises(DeviceError) as caught:
            restore_left_changes(directory, ["GPU-a"])
        assert str(caught.value) == (
            "GPU-a: a killed run has left its settings on it (Insufficient Permissions); run a test that "
            f"leases it as root, or nvidia-smi -i GPU-a with -pl 700, and -rgc; then rm {path}"
        )
        assert path.exists()


@pytest.mark.slow
def test_storm(suite: pytest.Pytester, world: World) -> None:
    """Any processes, at any moment: after one more run nothing is left."""
    draw = random.Random(7)
    suite.makepyfile(SWEEP)
    for attempt in range(40):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--energy-report"]
        with subprocess.Popen(
            command, cwd=suite.path, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            time.sleep(draw.uniform(0.3, 6.0))
            with suppress(psutil.NoSuchProcess):
                family = [
                    psutil.Process(process.pid),
                    *psutil.Process(process.pid).children(recursive=True),
                ]
                guards = [each for each in family if is_guard(each)]
                victims = [family, family[:1], guards or family[:1]][attempt % 3]
                kill_all(draw.sample(victims, len(victims)))
            process.kill()
    suite.makepyfile("import pytest\n@pytest.mark.gpus(3)\ndef test_it(gpus): pass\n")
    run(suite).assert_outcomes(passed=1)
    assert (set_on(world), files()) == ([FACTORY] * 3, [])
