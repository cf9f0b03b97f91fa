# SPDX-License-Identifier: Apache-2.0
"""``--energy-worker-gpus``: GPUs that a process, or a worker of pytest-xdist, has for all its tests."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict

import pytest

from tests.nvml_sim import Board, World
from tests.nvml_sim.boards import Process

from .conftest import GiveBoards
from .project import Project, wait_for

pytest.importorskip("xdist")

#: Each process writes what a conftest, this module and its fixtures saw before the first test.
CONFTEST = """
import json, os
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
with open(f"conftest-{os.getpid()}", "w") as file:
    json.dump([os.environ.get("PYTEST_XDIST_WORKER"), VISIBLE], file)
"""

SUITE = """
import json, os, time
import pytest
from conftest import VISIBLE

NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")
SEEN = [os.environ.get(name) for name in NAMES]

@pytest.fixture(scope="session")
def model():
    return [os.getpid(), SEEN]

@pytest.mark.gpus(1)
@pytest.mark.parametrize("number", range(8))
def test_one(gpus, model, number):
    time.sleep(0.05)
    assert model == [os.getpid(), [os.environ.get(name) for name in NAMES]]
    with open(f"saw-{number}", "w") as file:
        json.dump([os.environ.get("PYTEST_XDIST_WORKER"), SEEN, gpus.uuids, VISIBLE], file)

@pytest.mark.gpus(2)
def test_two(gpus):
    assert gpus.visible_devices == SEEN[0]

@pytest.mark.gpus(2)
def test_ranks(workers, gpus):
    found = workers.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == SEEN[0].split(",") == list(gpus.uuids)

def test_no_gpu(workers):
    assert workers.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == [""]
"""

HOLD = """
import pathlib, time
import pytest

def hold(name):
    pathlib.Path(f"{name}.has").touch()
    while not pathlib.Path(f"{name}.go").exists():
        time.sleep(0.02)

@pytest.mark.gpus(2)
def test_two():
    hold("two")

@pytest.mark.gpus(4)
def test_four():
    hold("four")

def test_cpu(energy_meter):
    with energy_meter("w"):
        hold("cpu")
"""


@pytest.fixture
def world(project: Project, give_boards: GiveBoards) -> World:
    project.plugin("xdist")
    project.without_torch()
    project.write("conftest.py", CONFTEST)
    project.write("test_some.py", SUITE)
    project.write("hold.py", HOLD)
    return give_boards(project, [Board() for _ in range(4)])


def uuids(world: World, *indices: int) -> str:
    return ",".join(world.board(index).uuid for index in indices)


def test_a_process_has_its_gpus_before_anything_is_imported(project: Project, world: World) -> None:
    """Those that options and environment choose, if they do."""
    for args, env, own in (
        ([], {}, (0, 1)),
        (["--energy-gpus=3,1"], {}, (3, 1)),
        ([], {"CUDA_VISIBLE_DEVICES": "2,0"}, (2, 0)),
    ):
        project.pytest("--energy-worker-gpus=2", *args, **env).check(passed=11)
        visible = uuids(world, *own)
        for number in range(8):
            worker, seen, leased, in_conftest = json.loads(project.text(f"saw-{number}"))
            assert (worker, leased, in_conftest) == (None, [world.board(own[0]).uuid], visible)
            assert seen == [visible, "PCI_BUS_ID", visible, "1"]


def test_each_worker_has_gpus_of_its_own(project: Project, world: World) -> None:
    """As many workers as there are GPUs for; the ini key means the same as the option."""
    for n, tests, passed in ((1, ["-k", "test_one"], 8), (2, [], 11)):
        for path in project.path.glob("conftest-*"):
            path.unlink()
        project.write("pytest.ini", f"[pytest]\nenergy_worker_gpus = {n}\n")
        project.pytest("-nauto", *tests, PYTEST_XDIST_AUTO_NUM_WORKERS="").check(passed=passed)
        imported = [json.loads(path.read_text()) for path in project.path.glob("conftest-*")]
        # The controller has none.
        assert [visible for worker, visible in imported if worker is None] == [None]
        of_workers = {worker: visible.split(",") for worker, visible in imported if worker is not None}
        assert len(of_workers) == 4 // n
        had = sorted(each for own in of_workers.values() for each in own)
        assert had == uuids(world, 0, 1, 2, 3).split(",")
        used = defaultdict(set)
        for number in range(8):
            worker, seen, leased, _ = json.loads(project.text(f"saw-{number}"))
            assert seen[0].split(",") == of_workers[worker]
            assert leased == of_workers[worker][:1]
            used[worker].add(leased[0])
        assert len(used) > 1


def test_too_few_gpus_are_one_line(project: Project, world: World) -> None:
    for args, visible, found in (
        (("--energy-worker-gpus=5",), None, "4"),
        (("--energy-worker-gpus=5", "-n1"), None, "4"),
        (("--energy-worker-gpus=2", "-n3"), None, "at most 2"),
        (("--energy-worker-gpus=2",), "3", "CUDA_VISIBLE_DEVICES='3'"),
        (("--energy-worker-gpus=2", "-nauto"), "", "CUDA_VISIBLE_DEVICES=''"),
        (("--energy-worker-gpus=2", "--energy-gpus=3"), None, "--energy-gpus=3"),
        (("--energy-worker-gpus=two",), None, "whole number"),
    ):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        ended = project.pytest(*args, **env)
        assert ended.ret == 4
        (line,) = [each for each in ended.err.splitlines() if each]
        assert line.startswith(f"ERROR: {args[0]}: ")
        assert found in line
    assert not list(project.path.glob("saw-*"))


def test_a_test_that_needs_more_is_a_collection_error(project: Project, world: World) -> None:
    for workers in ([], ["-n2"]):
        ended = project.pytest("--energy-worker-gpus=1", *workers)
        needs = "@pytest.mark.gpus(2) needs more than --energy-worker-gpus=1"
        assert f"test_some.py::test_two: {needs}" in ended.text
        assert "raise that to 2" in ended.text
        assert ended.counts["error"] == 2
        assert ended.ret != 0


def test_another_kind_of_gpu_is_an_error_unless_the_host_has_none(
    project: Project, give_boards: GiveBoards
) -> None:
    give_boards(project, [Board(name="NVIDIA H200"), Board(name="NVIDIA L40S")])
    project.write(
        "test_kind.py",
        "import pytest\n"
        "@pytest.mark.parametrize('n', [pytest.param(n, marks=pytest.mark.gpus(1, name=n)) "
        "for n in ('H200', 'L40S', 'B200')])\n"
        "def test_it(gpus, n): assert n in gpus.names[0]\n",
    )
    ended = project.pytest("--energy-worker-gpus=1", "-rs")
    ended.check(passed=1, error=1, skipped=1)
    assert "gpus(1, name='L40S'): this process has NVIDIA H200" in ended.text


def test_others_wait_for_these_gpus_until_the_process_ends(project: Project, world: World) -> None:
    holder = project.start_pytest("hold.py::test_two", "--energy-worker-gpus=2")
    wait_for(lambda: project.exists("two.has"))
    for args in (["hold.py::test_four"], ["--energy-worker-gpus=3"], ["--energy-worker-gpus=3", "-n1"]):
        ended = project.pytest(*args, "--energy-lease-timeout=0.5")
        assert ended.ret == (1 if "hold.py::test_four" in args else 4)
        assert re.search(rf"process {holder.pid} .*\(--energy-worker-gpus=2\)", ended.text)
    project.pytest("--energy-worker-gpus=2", "--energy-lease-timeout=0.5").check(passed=11)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    project.pytest("--energy-worker-gpus=2", "-n2", "--energy-lease-timeout=60").check(passed=11)


def test_a_plain_test_waits_for_nothing(project: Project, world: World) -> None:
    holder = project.start_pytest("hold.py::test_cpu", project.meter(), CUDA_VISIBLE_DEVICES="")
    wait_for(lambda: project.exists("cpu.has"))
    args = ("-k", "one or two", "--energy-worker-gpus=2", "--energy-lease-timeout=0.1")
    project.pytest(*args).check(passed=9)
    project.write("cpu.go", "")
    holder.communicate(timeout=60)
    assert holder.returncode == 0


def test_busy_gpus_fail_the_run_or_skip_the_tests(project: Project, world: World) -> None:
    for index in range(4):
        world.update(index, processes=(Process(os.getpid()),))
    options = ["--energy-worker-gpus=2", "--energy-lease-timeout=0.3"]
    for workers in ([], ["-n2"]):
        ended = project.pytest(*options, *workers)
        assert ended.ret == 4
        assert re.search(rf"busy with process {os.getpid()}\b", ended.err)
    ended = project.pytest(*options, "--energy-busy=skip", "-rs")
    ended.check(passed=1, skipped=10)
    assert re.search(rf"busy with process {os.getpid()}\b", ended.text)


def test_what_is_measured_is_on_these_gpus(project: Project, world: World) -> None:
    project.write(
        "test_measured.py",
        "import time\nimport pytest\n"
        "@pytest.mark.gpus(1)\ndef test_ranks(energy): energy(time.sleep, 0.1)\n"
        "@pytest.mark.gpus(1)\ndef test_process(energy_meter):\n    with energy_meter('w'): time.sleep(0.3)\n"
        "def test_all(energy_meter):\n    with energy_meter('w'): time.sleep(0.3)\n",
    )
    ended = project.pytest(
        "test_measured.py", "--energy-worker-gpus=2", "--energy-gpus=2,3", "--energy-report"
    )
    ended.check(passed=3)
    found = {name: each["devices"] for name, each in project.records().items()}
    first, both = [world.board(2).uuid], uuids(world, 2, 3).split(",")
    assert found == {"test_ranks": first, "test_process": first, "test_all": both}
    assert {each["status"] for each in project.records().values()} == {"measured"}
