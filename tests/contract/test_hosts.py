# SPDX-License-Identifier: Apache-2.0
"""Two hosts: a real Ray of two nodes on this machine, of which one has its own name and its own clock.

Needs root, ``unshare`` and ray. With LLENERGY_TEST_CLUSTER=required they may not be missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nvml_sim import Board, World, build_library

from .conftest import open_project
from .project import Project, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

#: How far the second host's monotonic clock is ahead (seconds).
AHEAD_S = 5000

ANOTHER = ["unshare", "--time", "--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S), "--uts", "--fork"]
ANOTHER += ["--kill-child", "sh", "-c", 'hostname "$0" && exec "$@"', "nodeb"]

#: Everything that a host starts ends with it.
ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str | None:
    """Return why there cannot be two hosts here."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed"
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "a host with a clock of its own needs root and unshare"
    done = subprocess.run([*ALONE, *ANOTHER, "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "namespaces are not permitted here"


@dataclass
class Hosts:
    """Two hosts with two boards each.

    Attributes:
        project: What runs on the first.
        worlds: Boards by name of the host.
    """

    project: Project
    worlds: dict[str, World]

    def run(self, source: str, *args: str) -> str:
        """Run a test file, and return what it printed."""
        self.project.write("test_it.py", source)
        ended = self.project.pytest("test_it.py", "--energy-report", "--energy-cluster=ray", "-rs", *args)
        return ended.out + ended.err


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Hosts]:
    reason = missing()
    if reason is not None:
        if os.environ.get("LLENERGY_TEST_CLUSTER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    library = build_library(shared / "contract_nvml")
    directory = tmp_path_factory.mktemp("hosts")
    # Unix sockets have short paths, and two sessions on a machine may not share addresses.
    scratch = tempfile.mkdtemp(prefix="llray-", dir="/tmp")
    net = f"127.{os.getpid() >> 8 & 127 | 64}.{os.getpid() & 255}"
    with socket.create_server((f"{net}.2", 0)) as server:
        address = f"{net}.2:{server.getsockname()[1]}"
    with ExitStack() as end, open_project(directory) as project:
        end.callback(shutil.rmtree, scratch, ignore_errors=True)
        project.without_torch()
        worlds = {}
        for number, name in ((2, socket.gethostname()), (3, "nodeb")):
            place = directory / name
            (place / "locks").mkdir(parents=True)
            (place / "locks").chmod(0o1777)
            ahead_s = AHEAD_S if name == "nodeb" else 0
            worlds[name] = World(
                place / "world",
                [
                    Board(
                        uuid=f"GPU-{number:08x}-0000-0000-0000-{index:012x}",
                        power_w=100.0 * number + 10 * index,
                        latch_phase_ns=23_000_000 * index,
                    )
                    for index in range(2)
                ],
                start_ns=time.monotonic_ns() + (ahead_s - 10) * 10**9,
            )
            env = {
                **project.env,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{project.path}",
                "LLENERGY_LOCK_DIR": str(place / "locks"),
                "LLENERGY_CACHE_DIR": str(place),
                "CUDA_VISIBLE_DEVICES": ",".join(worlds[name].board(index).uuid for index in range(2)),
                "PYTHONUNBUFFERED": "1",
                **worlds[name].environment(library.parent),
            }
            start = ["--head", f"--port={address.rpartition(':')[2]}", f"--temp-dir={scratch}"]
            start += ["--include-dashboard=false"]
            if name == "nodeb":
                start = [f"--address={address}"]
            log = place / "ray.log"
            with log.open("wb") as output:
                ray = subprocess.Popen(
                    [
                        *(*ALONE, *(ANOTHER if name == "nodeb" else [])),
                        *(sys.executable, "-m", "ray.scripts.scripts", "start", *start, "--block"),
                        *(f"--node-ip-address={net}.{number}", "--num-gpus=2", "--num-cpus=2"),
                        *(f"--object-store-memory={80 << 20}", "--disable-usage-stats"),
                    ],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            end.callback(ray.wait)
            end.callback(ray.kill)
            wait_for(lambda log=log: "Ray runtime started" in log.read_text(), 180)  # type: ignore[misc]
        head = worlds[socket.gethostname()]
        project.env |= {
            "RAY_ADDRESS": address,
            "LLENERGY_LOCK_DIR": str(directory / socket.gethostname() / "locks"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{project.path}",
            **head.environment(library.parent),
        }
        yield Hosts(project, worlds)


BOTH = """
import json, os, platform, time
import pytest
from tests.nvml_sim import World

def where():
    return platform.node(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]

def draw(seconds):
    with open("worlds.json") as file:
        world = World.open(json.load(file)[platform.node()])
    uuids = [world.board(index).uuid for index in range(2)]
    index = uuids.index(os.environ["CUDA_VISIBLE_DEVICES"])
    world.set_power(index, 600.0)
    time.sleep(seconds)
    world.set_power(index, 100.0)

@pytest.mark.gpus(4, per_host=2)
def test_both(energy, workers):
    found = workers.run(where)
    assert [each[1:3] for each in found] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert len({each[0] for each in found}) == 2
    assert len({each[3] for each in found}) == 4
    energy(workers.call(draw, 0.5))

@pytest.mark.gpus(16, per_host=8)
def test_too_many(workers):
    raise SystemExit("ran")

@pytest.mark.gpus(4, per_host=2)
def test_window(energy_meter, workers):
    with energy_meter("w"):
        workers.run(draw, 0.6)
        time.sleep(0.3)
"""


def test_energy_of_two_hosts_is_that_of_all_their_boards(hosts: Hosts) -> None:
    """Of the same time, though the clocks of the hosts differ by more than an hour."""
    places = {name: str(world.path) for name, world in hosts.worlds.items()}
    hosts.project.write("worlds.json", json.dumps(places))
    said = hosts.run(BOTH)
    assert "2 passed, 1 skipped" in said, said
    assert "SystemExit" not in said
    boards = {
        f"{name}/gpu:{world.board(index).uuid}": (world, index, AHEAD_S * 10**9 * (name == "nodeb"))
        for name, world in hosts.worlds.items()
        for index in range(2)
    }
    records = hosts.project.records()
    both = records["test_both"]
    assert {rank["host"] for rank in both["ranks"]} == set(hosts.worlds)
    parts = [*both["rounds"], *records["test_window"]["windows"]]
    known = [part for part in parts if part["energy_j"] is not None]
    assert len(known) >= 2, [part["reason"] for part in parts]
    for part in known:
        assert set(part["by_domain"]) == set(boards)
        true_j = 0.0
        for world, index, ahead_ns in boards.values():
            start_ns = round(part["start_s"] * 1e9) + ahead_ns
            true_j += world.true_energy_j(index, start_ns, start_ns + round(part["duration_s"] * 1e9))
        assert part["energy_j"] == pytest.approx(true_j, abs=4 * part["energy_u_j"])
        assert part["energy_u_j"] < 0.1 * true_j
    assert set(hosts.project.report()["environment"]["hosts"]) == set(hosts.worlds)


FAILS = """
import os, platform, time
import pytest

def work():
    if platform.node() == "nodeb":
        os._exit(5)
    time.sleep(60)

@pytest.mark.gpus(2, per_host=1)
def test_fails(workers):
    workers.run(work)
"""


def test_a_rank_that_dies_on_the_other_host_is_named_with_it(hosts: Hosts) -> None:
    said = hosts.run(FAILS)
    assert "1 failed" in said, said
    assert "nodeb" in said
    assert "rank 1" in said


def test_nothing_is_left_on_either_host_after_kill_9(hosts: Hosts) -> None:
    source = FAILS.replace("os._exit(5)", "time.sleep(600)").replace(
        "    time.sleep(60)", "    open('running', 'w').close()\n    time.sleep(600)"
    )
    hosts.project.write("test_it.py", source)
    before = set(hosts.project.processes())
    process = hosts.project.start_pytest("test_it.py", "--energy-cluster=ray")
    wait_for(lambda: hosts.project.exists("running"))
    process.kill()
    process.communicate()

    def ranks() -> list[str]:
        now = hosts.project.processes()
        return [command for pid, command in now.items() if pid not in before and "llenergy" in command]

    wait_for(lambda: not ranks(), 60)
