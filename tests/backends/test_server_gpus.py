# SPDX-License-Identifier: Apache-2.0
"""Servers on several GPUs: real processes on simulated boards of known power."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim.fixtures import Give
from ..nvml_sim.shapes import Burst
from ..nvml_sim.world import Board, World
from .servers.start import running, sharded

pytest.importorskip("aiohttp")

Read = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

#: The stand-in lists pids as processes here see them, also in a container.
CONFTEST = """
import os
from pytest_llenergy.devices import processes
processes.FIRST_PID_NAMESPACE = int(os.readlink("/proc/self/ns/pid").removeprefix("pid:[")[:-1])
"""

TEST = """
import pytest
@pytest.mark.gpus({gpus})
def test_it(energy, backend):
    energy(backend.serve, ["abc", "hello"], concurrency=2, num_requests=8, max_new_tokens=4)
"""


@pytest.fixture(autouse=True)
def _few_plugins(few_plugins: None) -> None:
    """Start inner runs faster."""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 4\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = server\n"
    )
    pytester.makeconftest(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    return pytester


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    """Two boards at constant power, and two that alternate between two powers."""
    waves: list[dict[str, Any]] = [
        {"power_w": 90.0},
        {"power_w": 240.0},
        {"burst": Burst(100, 300, 40_000_000, 0.5)},
        {"burst": Burst(50, 500, 60_000_000, 0.25)},
    ]
    boards = [Board(name="NVIDIA H200", latch_ns=20_000_000, **wave) for wave in waves]
    return nvml_children(World(tmp_path / "world", boards))


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider", "-rs", *args)


def elsewhere(record: dict[str, Any]) -> list[list[str]]:
    """The boards of each round that are flagged because the server is not on them."""
    return [
        [
            each["detail"].partition(":")[0]
            for each in round_["flags"]
            if (each["name"], each["severity"]) == ("gpu-processes", "invalid")
        ]
        for round_ in record["rounds"]
    ]


@pytest.mark.slow
def test_each_gpu_has_the_joules_of_the_processes_of_one_server(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    suite.makepyfile(TEST.format(gpus=4))
    command = sharded("{gpus}", first=0.05, step=0.03)
    run(suite, f"--energy-server={command}").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    uuids = [world.board(index).uuid for index in range(4)]
    (rank,) = record["ranks"]
    assert rank["device"].split(",") == record["devices"] == uuids
    assert len(rank["workers"]) == 1
    assert set(record["parallel"].values()) == {1}
    assert record["status"] == "measured"
    assert elsewhere(record) == [[]] * 4
    # As it was written: the number of GPUs is that of the devices.
    # A busy host may read a board too rarely in a round.
    names = [f"gpu:{uuid}" for uuid in uuids]
    known = [each for each in record["rounds"] if all(each["by_domain"][name]["energy_j"] for name in names)]
    assert len(known) >= 2
    deviations = []
    for round_ in known:
        for index, name in enumerate(names):
            part = round_["by_domain"][name]
            truth_j = true_energy_j(world, [index], round_)
            deviations.append(abs(part["energy_j"] - truth_j) / part["energy_u_j"])
    # One may be off by more than three standard uncertainties.
    assert sorted(deviations)[-2] <= 3
    assert max(deviations) <= 5


def true_energy_j(world: World, indices: list[int], round_: dict[str, Any]) -> float:
    """The energy of a round on these boards."""
    start_ns = round(round_["start_s"] * 1e9)
    end_ns = start_ns + round(round_["duration_s"] * 1e9)
    return sum(world.true_energy_j(each, start_ns, end_ns) for each in indices)


@pytest.mark.slow
def test_each_leased_board_must_have_a_process_of_the_server(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    """One server has a process on the first board only, the other on none."""
    suite.makepyfile(
        "import pytest\n"
        "@pytest.mark.gpus(2)\n"
        "def test_role(energy, backend):\n"
        "    energy(backend.serve, ['abc', 'hello'], concurrency=2, num_requests=8, max_new_tokens=4)\n"
    )
    commands = [f"--energy-server=s{shards}={sharded(shards, first=0.05)}" for shards in (0, 1)]
    result = run(suite, *commands, "--energy-backend=s0,s1", "--energy-rounds=2")
    none, one = read_report()["records"]
    uuids = [world.board(index).uuid for index in range(2)]
    assert (elsewhere(none), elsewhere(one)) == ([uuids] * 2, [uuids[1:]] * 2)
    for record in (none, one):
        assert record["status"] == "invalid"
        energies = {name: each["value"] for name, each in record["metrics"].items() if "energy" in name}
        assert set(energies.values()) == {None}
    lines = " ".join(result.stdout.str().split())
    assert "the server has no process on this board; lease only boards that it uses, or let it use" in lines


@pytest.mark.parametrize(("gpus", "shards", "wrong"), [(2, 2, []), (1, 2, [1])], ids=["equal", "more"])
def test_a_running_server_must_be_on_the_leased_boards_and_no_others(
    suite: pytest.Pytester, world: World, read_report: Read, gpus: int, shards: int, wrong: list[int]
) -> None:
    suite.makepyfile(TEST.format(gpus=gpus))
    with running(sharded(shards, first=0.05)) as (url, process):
        run(suite, f"--energy-server={url}", "--energy-rounds=2")
    (record,) = read_report()["records"]
    assert record["ranks"][0]["workers"] == [process.pid]
    assert elsewhere(record) == [[world.board(index).uuid for index in wrong]] * 2
    assert record["status"] == ("invalid" if wrong else "measured")


@pytest.mark.slow
def test_a_server_whose_processes_are_not_visible_is_flagged_and_not_invalid(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    suite.makeconftest("from pytest_llenergy.devices import processes\nprocesses.FIRST_PID_NAMESPACE = 0\n")
    suite.makepyfile(TEST.format(gpus=2))
    run(suite, f"--energy-server={sharded(1)}", "--energy-rounds=2").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert elsewhere(record) == [[], []]
    assert "gpu-processes" in {each["name"] for each in record["rounds"][0]["flags"]}


def test_degrees_and_hosts_of_a_server_are_refused(suite: pytest.Pytester, world: World) -> None:
    suite.makepyfile(
        "import pytest\n"
        "@pytest.mark.gpus(2)\n@pytest.mark.parallel(tensor=2)\ndef test_degree(backend): pass\n"
        "@pytest.mark.gpus(4, per_host=2)\ndef test_hosts(backend): pass\n"
    )
    result = run(suite, f"--energy-server={sharded('{gpus}')}")
    result.assert_outcomes(skipped=2)
    text = " ".join(result.stdout.str().split())
    assert "server does not offer tensor parallelism" in text
    assert "does not offer one model over several hosts (it needs 4 devices, and a host has 2)" in text
