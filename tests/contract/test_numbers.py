# SPDX-License-Identifier: Apache-2.0
"""Energy against a known answer: meters of constant power, and simulated boards with exactly known power."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.nvml_sim import Board, World

from .conftest import GiveBoards, open_project
from .project import BOARDS_ALONE, Project, flags

pytestmark = pytest.mark.clock

ROOT = Path(__file__).parents[2]
MS = 1_000_000

#: Lets a test of a user draw power on simulated boards.
POWER = """
import os, time
from tests.nvml_sim import World

def open_world():
    return World.open(os.environ["NVML_SIM_WORLD"])

def draw(watts, seconds, idle=100.0, boards=(0,)):
    world = open_world()
    for board in boards:
        world.set_power(board, watts)
    time.sleep(seconds)
    for board in boards:
        world.set_power(board, idle)
"""

ROUNDS = """
import pytest
from power import draw

@pytest.mark.energy_options(rounds=12)
def test_rounds(energy):
    energy(draw, 400.0, 0.45)

@pytest.mark.energy_options(rounds=6)
def test_short_rounds(energy):
    energy(draw, 400.0, 0.15)

@pytest.mark.energy_options(rounds=3, iterations=1)
def test_too_short(energy):
    energy(draw, 400.0, 0.0005)

@pytest.mark.gpus(1)
@pytest.mark.energy_options(rounds=4)
def test_rounds_in_a_rank(energy):
    energy(draw, 300.0, 0.5)
"""

WINDOWS = """
import time
from power import draw

def test_windows(energy_meter):
    for number in range(12):
        time.sleep(0.2 + 0.013 * number)
        with energy_meter(f"w{number}"):
            draw(250.0 + 20 * number, 0.3 + 0.017 * number)

def test_nested(energy_meter):
    with energy_meter("outer"):
        with energy_meter("a"):
            draw(400.0, 0.4)
        with energy_meter("b"):
            time.sleep(0.4)
"""


def true_j(world: World, part: dict[str, Any], board: int = 0) -> float:
    """Return the true energy of a round or window."""
    start_ns = round(part["start_s"] * 1e9)
    return world.true_energy_j(board, start_ns, start_ns + round(part["duration_s"] * 1e9))


def deviations(world: World, parts: list[dict[str, Any]]) -> list[float]:
    """Return |error| / u of each round or window that has an energy."""
    known = [part for part in parts if part["energy_j"] is not None]
    # A machine that is busy for a whole quiet gap may leave one without readings.
    assert len(known) >= 0.7 * len(parts), [part["reason"] for part in parts]
    return [abs(part["energy_j"] - true_j(world, part)) / part["energy_u_j"] for part in known]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, give_boards: GiveBoards
) -> Iterator[tuple[Project, World]]:
    """A project that has measured rounds and windows on a board that ticks every 100 ms."""
    with open_project(tmp_path_factory.mktemp("numbers")) as project:
        world = give_boards(
            project, [Board(name="NVIDIA GeForce RTX 4090", power_w=100.0, latch_jitter_ns=2 * MS)]
        )
        project.without_torch()
        project.env["PYTHONPATH"] = str(ROOT)
        project.write("pytest.ini", BOARDS_ALONE)
        project.write("power.py", POWER)
        project.write("test_rounds.py", ROUNDS)
        project.write("test_windows.py", WINDOWS)
        project.pytest("--energy-report").check(passed=6)
        yield project, world


def test_rounds_and_windows_are_right_within_their_uncertainty(measured: tuple[Project, World]) -> None:
    project, world = measured
    for test in ("test_rounds", "test_short_rounds", "test_rounds_in_a_rank"):
        found = deviations(world, project.records()[test]["rounds"])
        assert max(found) < 4, test
        assert sum(each > 2 for each in found) <= max(1, 0.2 * len(found)), test
    nested = project.records()["test_nested"]["windows"]
    found = deviations(world, project.records()["test_windows"]["windows"] + nested)
    assert max(found) < 4
    assert sum(each > 2 for each in found) <= 0.2 * len(found)
    windows = {each["name"]: each for each in nested}
    parts = windows["a"]["energy_j"] + windows["b"]["energy_j"]
    u = sum(each["energy_u_j"] for each in nested)
    assert windows["outer"]["energy_j"] == pytest.approx(parts, abs=3 * u)


def test_no_width_hides_a_loss(measured: tuple[Project, World]) -> None:
    """Uncertainties are as wide as the errors, and small beside the energy."""
    project, world = measured
    records = project.records()
    rounds = records["test_rounds"]["rounds"]
    # Usually 0.2 to 0.4; so few rounds scatter.
    assert median(deviations(world, rounds + records["test_short_rounds"]["rounds"])) > 0.1
    known = [part for part in rounds if part["energy_j"] is not None]
    assert median(part["energy_u_j"] / part["energy_j"] for part in known) < 0.05
    # A two-hundredth of a tick.
    short = [flag for part in records["test_too_short"]["rounds"] for flag in part["flags"]]
    said = {flag["detail"] for flag in short if flag["name"] == "imprecise"}
    assert any(detail.startswith("standard uncertainty") for detail in said), short


def test_metrics_and_power_over_time_are_those_of_the_rounds(measured: tuple[Project, World]) -> None:
    """400 W for 0.45 s above an idle power of 100 W."""
    project, world = measured
    record = project.records()["test_rounds"]
    metrics = {name: each["value"] for name, each in record["metrics"].items()}
    truths = [true_j(world, part) for part in record["rounds"]]
    assert metrics["energy_j"] == pytest.approx(median(truths), rel=0.05)
    assert metrics["mean_power_w"] == pytest.approx(400, rel=0.08)
    idle_j = 100 * metrics["duration_s"]
    assert metrics["net_energy_j"] == pytest.approx(median(truths) - idle_j, rel=0.08)
    assert record["metrics"]["energy_j"]["n"] >= 8
    # One and a half ticks long: two readings of the counter would be a third off.
    short = project.records()["test_short_rounds"]
    truths = [true_j(world, part) for part in short["rounds"]]
    assert short["metrics"]["energy_j"]["value"] == pytest.approx(median(truths), rel=0.05)


def draws(project: Project, source: str) -> None:
    """Write a test that draws power."""
    project.without_torch()
    project.write("pytest.ini", BOARDS_ALONE)
    project.env["PYTHONPATH"] = str(ROOT)
    project.write("power.py", POWER)
    project.write("test_it.py", source)


EIGHT = """
from power import draw

def test_it(energy_meter):
    for number in range(4):
        draw(100.0, 0.15, boards=range(8))
        with energy_meter(f"w{number}"):
            draw(300.0, 0.5, boards=range(8))
"""


def test_eight_boards_that_tick_every_20_ms(project: Project, give_boards: GiveBoards) -> None:
    boards = [
        Board(power_w=100.0, latch_ns=20 * MS, latch_phase_ns=2_300_000 * number) for number in range(8)
    ]
    world = give_boards(project, boards)
    draws(project, EIGHT)
    project.pytest("--energy-report").check(passed=1)
    (record,) = project.records().values()
    found = []
    for window in record["windows"]:
        assert len(window["by_domain"]) == 8
        for number in range(8):
            domain = window["by_domain"][f"gpu:{world.board(number).uuid}"]
            assert domain["energy_j"] is not None, domain["reason"]
            error_j = abs(domain["energy_j"] - true_j(world, window, number))
            found.append(error_j / domain["energy_u_j"])
            # A tick is 6 J: one that is overlooked cannot hide in the uncertainty.
            assert error_j < 10
        total_j = sum(each["energy_j"] for each in window["by_domain"].values())
        assert window["energy_j"] == pytest.approx(total_j)
    assert max(found) < 5
    assert sum(each > 2 for each in found) <= 0.2 * len(found)


DISTURBED = """
import time
from power import draw, open_world

WORLD = open_world()

def test_it(energy_meter):
    time.sleep(0.3)
    with energy_meter("before"):
        draw(300.0, 0.5)
    time.sleep(0.5)
    with energy_meter("during"):
        WORLD.set_power(0, 300.0)
        time.sleep(0.4)
        {event}
        time.sleep(0.4)
        WORLD.set_power(0, 100.0)
    time.sleep(0.5)
"""


def test_a_counter_that_starts_anew_gives_no_wrong_number(project: Project, give_boards: GiveBoards) -> None:
    world = give_boards(project, [Board(power_w=100.0, latch_ns=20 * MS)])
    draws(project, DISTURBED.format(event="WORLD.reset_counter(0)"))
    project.pytest("--energy-report").check(passed=1)
    before, during = next(iter(project.records().values()))["windows"]
    assert before["energy_j"] == pytest.approx(true_j(world, before), abs=4 * before["energy_u_j"])
    if during["energy_j"] is None:
        assert during["reason"]
    else:
        assert during["energy_j"] == pytest.approx(true_j(world, during), abs=4 * during["energy_u_j"])


ABOVE_ITS_LIMIT = """
import time
from power import draw

def test_it(energy_meter):
    for number in range(5):
        time.sleep(0.4)
        with energy_meter(f"w{number}"):
            time.sleep(0.1)
            draw(650.0, 0.035)
            time.sleep(0.1)
"""


def test_a_power_limit_is_no_physical_ceiling(project: Project, give_boards: GiveBoards) -> None:
    board = Board(power_w=100.0, latch_ns=20 * MS, power_limit_w=250.0)
    world = give_boards(project, [board])
    draws(project, ABOVE_ITS_LIMIT)
    project.pytest("--energy-report").check(passed=1)
    for window in next(iter(project.records().values()))["windows"]:
        assert window["energy_j"] is not None, window["reason"]
        assert window["energy_j"] == pytest.approx(true_j(world, window), abs=4 * window["energy_u_j"])


def test_the_plain_power_reading_of_an_old_driver(project: Project, give_boards: GiveBoards) -> None:
    """It has neither a counter nor a reading that says over which time it is a mean."""
    board = Board(
        power_w=100.0,
        energy_supported=False,
        unsupported_fields=(185, 186),
        power_usage_averaged=False,
        power_latch_ns=100 * MS,
        power_window_ns=100 * MS,
    )
    world = give_boards(project, [board])
    draws(project, "from power import draw\ndef test_it(energy): energy(draw, 300.0, 1.0)\n")
    project.pytest("--energy-report").check(passed=1)
    (record,) = project.records().values()
    assert max(deviations(world, record["rounds"])) < 4


def test_the_energy_of_a_board_is_never_estimated(project: Project, give_boards: GiveBoards) -> None:
    board = Board(power_w=100.0, energy_supported=False, scopes=(), power_usage_supported=False)
    give_boards(project, [board])
    source = "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy_meter):\n"
    project.write("test_it.py", f"{source}    with energy_meter('w'): sum(range(100_000))\n")
    project.pytest("--energy-report").check(passed=1)
    (record,) = project.records().values()
    assert record["status"] == "invalid"
    assert record["reason"]
    assert [window["energy_j"] for window in record["windows"]] == [None]
    required = project.pytest("--energy-require=measured")
    assert required.ret == 1
    assert "measure" in required.text


#: A test that measures for two seconds with a power meter that prints lines.
SLEEP = "import time\ndef test_it(energy_meter):\n    with energy_meter('w'): time.sleep(2.0)\n"


def metered(project: Project, source: str, stated: str = "") -> tuple[float | None, str]:
    """Return joules and reason of a window of two seconds, read from a program that prints watts."""
    project.write("meter.py", f"import itertools, time\nfor n in itertools.count():\n{source}\n")
    project.write("test_it.py", SLEEP)
    ended = project.pytest("--energy-report", f"--energy-meter=command:{sys.executable} meter.py{stated}")
    if not project.exists("energy.json"):
        return None, ended.text
    (record,) = project.records().values()
    (window,) = record["windows"] or [{"energy_j": None, "reason": record["reason"]}]
    return window["energy_j"], str(window["reason"])


def test_a_power_meter_is_integrated_and_one_that_stops_gives_a_reason(project: Project) -> None:
    joules, _ = metered(project, "    print(100, flush=True); time.sleep(0.05)")
    assert joules == pytest.approx(200, rel=0.1)
    joules, reason = metered(project, "    print(100 if n < 15 else 'n/a', flush=True); time.sleep(0.05)")
    assert joules is None
    assert "n/a" in reason or "number" in reason or "not read" in reason


def test_one_absurd_line_of_a_power_meter_gives_no_number(project: Project) -> None:
    """As printed by a sensor whose register overflows."""
    line = "    print(65535 if n % 20 == 19 else 100, flush=True); time.sleep(0.05)"
    joules, reason = metered(project, line)
    assert joules is None or joules < 300
    assert reason


def test_lines_of_several_gpus_are_refused_or_added_if_the_user_says_so(project: Project) -> None:
    """As nvidia-smi prints them: a line for each of four GPUs, twice a second."""
    line = "    print('100\\n' * 4, end='', flush=True); time.sleep(0.5)"
    joules, reason = metered(project, line)
    assert joules is None
    assert "prints several lines at a moment; if they are of N sensors, write @sum=N behind it" in reason
    joules, _ = metered(project, line, "@sum=4")
    assert joules == pytest.approx(800, rel=0.3)


def test_another_holder_of_the_cpu_is_flagged(project: Project) -> None:
    project.write("test_it.py", "import time\ndef test_it(energy): energy(time.sleep, 0.5)\n")
    burn = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
    try:
        ended = project.pytest("--energy-report", project.meter()).check(passed=1)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    (record,) = project.records().values()
    assert "contended" in flags(record)
    assert "other processes" in ended.text
    assert all(part["other_cpu_s"] > 0.05 for part in record["rounds"])


def test_a_command_is_measured(project: Project, give_boards: GiveBoards) -> None:
    give_boards(project, [Board(power_w=150.0, latch_ns=20 * MS)])
    done = project.llenergy(
        "run", "--meter=nvml", "--format=json", "--", sys.executable, "-c", "import time; time.sleep(1)"
    )
    assert done.ret == 0
    found = json.loads(done.out)
    told = json.dumps(found)
    assert "energy_j" in told
    joules, seconds = first(found, "energy_j"), first(found, "duration_s")
    assert joules == pytest.approx(150 * seconds, rel=0.1)


def first(value: Any, name: str) -> float:
    """Return the first value with this name, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get(name), float):
            return float(value[name])
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            found = first(each, name)
            if found:
                return found
    return 0.0
