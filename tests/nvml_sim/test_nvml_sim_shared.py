# SPDX-License-Identifier: Apache-2.0
"""The world shared by processes: discovery, live changes, torn reads, refusals, and the layout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import build, layout
from .boards import Board
from .build import SOURCES, BuildError, build_library
from .shapes import Burst
from .waveform import Segment, Waveform
from .world import NO_PERMISSION, WORLD_VARIABLE, World

pytest.importorskip("pynvml")

INIT_ERROR = """
import pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    print(type(error).__name__)
"""

WATCH_POWER = """
import time, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
seen, deadline = None, time.monotonic() + 30
while seen != 450_000 and time.monotonic() < deadline:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [186])[0].value.uiVal
    if value != seen:
        print(value, flush=True)
        seen = value
"""

# Every published state holds five equal throttle times, and energy never runs backwards.
WATCH_CONSISTENCY = """
import time, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
last, seen, deadline = 0, set(), time.monotonic() + 30
print("ready", flush=True)
while len(seen) < 100:
    assert time.monotonic() < deadline, len(seen)
    values = pynvml.nvmlDeviceGetFieldValues(handle, [83, 74, 76, 269, 270, 271])
    energy, *throttle = (value.value.ullVal for value in values)
    assert len(set(throttle)) == 1, throttle
    assert energy >= last, (energy, last)
    last = energy
    seen.add(throttle[0])
print("done")
"""


def start(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    merged = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", code], env=merged, stdout=subprocess.PIPE, text=True)


def output_of(code: str, environment: dict[str, str]) -> str:
    with start(code, environment) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return text.strip()


def test_a_live_power_change_is_seen_by_another_process(tmp_path: Path, nvml_library: Path) -> None:
    with World(tmp_path / "world", [Board(power_w=50.0)]) as world:
        with start(WATCH_POWER, world.environment(nvml_library.parent)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "50000\n"
            world.set_power(0, 450.0)
            assert process.stdout.readline() == "450000\n"
        assert process.returncode == 0
        assert world.init_count() == 1


def test_readers_never_see_a_torn_or_revised_state(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board(latch_ns=0)])
    with start(WATCH_CONSISTENCY, world.environment(nvml_library.parent)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        round_number = 0
        while process.poll() is None:
            round_number += 1
            world.update(0, throttle_ns=dict.fromkeys(layout.THROTTLE_FIELDS, round_number))
            if round_number < layout.MAX_STEPS:
                world.set_power(0, 50.0 + 600.0 * (round_number % 2))
        assert process.stdout.read() == "done\n"


def test_a_second_writer_drives_the_same_world(tmp_path: Path) -> None:
    first = World(tmp_path / "world", [Board(power_w=100.0)])
    second = World.open(tmp_path / "world")
    at = second.set_power(0, 300.0)
    assert first.true_energy_j(0, at - 10**9, at + 2 * 10**9) == 700.0
    with pytest.raises(ValueError, match="time order"):
        first.set_power(0, 200.0, at_ns=at - 1)
    with pytest.raises(ValueError, match="set_power"):
        first.update(0, power_w=5.0)
    with pytest.raises(ValueError, match="cannot update"):
        first.update(0, no_such_field=5)


@pytest.mark.parametrize("variable", [None, "", "missing"])
def test_without_a_world_the_driver_is_not_loaded(
    tmp_path: Path, nvml_library: Path, variable: str | None
) -> None:
    environment = World(tmp_path / "world", []).environment(nvml_library.parent)
    environment[WORLD_VARIABLE] = str(tmp_path / variable) if variable else ""
    assert output_of(INIT_ERROR, environment) == "NVMLError_DriverNotLoaded"


def test_init_can_be_refused(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board()], init_result=NO_PERMISSION)
    environment = world.environment(nvml_library.parent)
    assert output_of(INIT_ERROR, environment) == "NVMLError_NoPermission"
    world.set_init_result(0)
    assert output_of(INIT_ERROR, environment) == ""


@pytest.mark.parametrize("field", ["magic", "version", "file_size", "state_size", "board_count"])
def test_another_layout_is_a_version_mismatch(tmp_path: Path, nvml_library: Path, field: str) -> None:
    world = World(tmp_path / "world", [Board()])
    setattr(world._header, field, getattr(world._header, field) + 1)
    environment = world.environment(nvml_library.parent)
    assert output_of(INIT_ERROR, environment) == "NVMLError_LibRmVersionMismatch"


def test_the_c_source_pins_the_layout_that_python_defines() -> None:
    source = (SOURCES / "layout.h").read_text()
    pinned = [line for line in source.splitlines() if re.fullmatch(r"(AT|SIZE)\(.*\);", line)]
    assert pinned[: len(layout.c_assertions().splitlines())] == layout.c_assertions().splitlines()
    defined = dict(re.findall(r"#define (\w+) (\d+)u$", source, re.MULTILINE))
    assert defined["WORLD_VERSION"] == str(layout.VERSION)
    for name in ("MAX_BOARDS", "MAX_STEPS", "MAX_PROCESSES", "MAX_MIG", "MAX_UNSUPPORTED", "MAX_RESETS"):
        assert defined[name] == str(getattr(layout, name))
    numbers = dict(re.findall(r"\b((?:FLAG|STEP)_\w+) = (\d+)", source))
    assert numbers == {
        name: str(value) for name, value in vars(layout).items() if name.startswith(("FLAG_", "STEP_"))
    }


def test_the_true_energy_equals_the_sum_over_nanoseconds() -> None:
    wave = Waveform(
        Segment(100, 7),
        Segment(130, 2, 50, period_ns=9, high_ns=4, kind=layout.STEP_BURST),
        Segment(171, 11),
        Segment(180, 3, 9, period_ns=7, seed=5, kind=layout.STEP_NOISE),
    )
    for begin, end in ((90, 230), (133, 133), (135, 170), (128, 172), (150, 155), (181, 222)):
        assert wave.energy_pj(begin, end) == sum(wave.power_mw(at) for at in range(begin, end))
    with pytest.raises(ValueError, match="before it starts"):
        wave.energy_pj(2, 1)


def test_a_burst_uses_its_mean_power(tmp_path: Path) -> None:
    world = World(tmp_path / "world", [Board(burst=Burst(100.0, 500.0, 1_000_000, 0.25))], start_ns=0)
    assert world.true_energy_j(0, 0, 10**9) == 200.0
    assert world.board(0).burst == Burst(100.0, 500.0, 1_000_000, 0.25)


def test_a_compiler_failure_shows_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"broken\.c"):
        build_library(tmp_path / "out")


def test_the_build_is_reused(nvml_library: Path) -> None:
    before = nvml_library.stat().st_mtime_ns
    assert build_library(nvml_library.parent) == nvml_library
    assert nvml_library.stat().st_mtime_ns == before
