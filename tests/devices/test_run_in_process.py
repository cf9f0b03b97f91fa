# SPDX-License-Identifier: Apache-2.0
"""Tests whose code runs in pytest's own process on a host with GPUs: what is measured and what is visible."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..ranks.no_torch import without_torch

Read = Callable[..., dict[str, Any]]

PLAIN = """
import time
def test_call(energy):
    assert energy(time.sleep, 0.3).energy_j > 100
def test_window(energy_meter):
    with energy_meter("nap") as window:
        time.sleep(0.5)
    assert window.energy_j > 100
"""

#: Notes what CUDA would see in the body of a test with a mark, and afterwards.
VISIBLE = """
import os, pytest, time
def seen(): return tuple(os.environ.get(f"{each}_VISIBLE_DEVICES") for each in ("CUDA", "HIP"))
@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    yield
    assert seen() == (None, None)
@pytest.mark.gpus(1)
def test_leased(energy_meter, gpus):
    assert seen() == (gpus.uuids[0], gpus.uuids[0])
    with energy_meter("nap"):
        time.sleep(0.3)
"""

#: Opens a file that stands for the one that every process with CUDA holds open.
WITH_CUDA = """
import pytest, time
from pytest_llenergy.devices import processes
processes.CUDA_FILE = str(__file__)
from tests.nvml_sim import World, Process
import os
world = World.open(os.environ["NVML_SIM_WORLD"])
def use(index):
    world.update(index, processes=[Process(os.getpid(), 2**30)])
    return open(__file__)
"""


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give, pytester: pytest.Pytester) -> World:
    pytester.makeini("[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\n")
    boards = [Board(uuid="GPU-a", power_w=1000.0), Board(uuid="GPU-b", power_w=500.0)]
    return nvml_children(World(tmp_path / "world", boards))


def run(pytester: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider", *args)


@pytest.mark.slow
def test_without_a_mark_every_visible_gpu_is_leased_and_measured(
    pytester: pytest.Pytester, world: World, read_report: Read
) -> None:
    run(pytester, PLAIN).assert_outcomes(passed=2)
    for record in read_report()["records"]:
        assert record["devices"] == ["GPU-a", "GPU-b"]
        measured = record["rounds"] or record["windows"]
        for part in measured:
            assert {"gpu:GPU-a", "gpu:GPU-b"} <= set(part["by_domain"])
            assert part["energy_j"] == pytest.approx(1500 * part["duration_s"], rel=0.05)


def test_the_process_sees_only_the_gpus_of_the_mark_during_the_test(
    pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    run(pytester, VISIBLE).assert_outcomes(passed=1)


def test_a_context_on_another_gpu_than_the_leased_one_is_an_error(
    pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    source = WITH_CUDA + (
        "@pytest.mark.gpus(1)\ndef test_right(energy_meter, gpus):\n    global file\n    file = use(0)\n"
        "    assert gpus.uuids == ('GPU-a',)\n    with energy_meter('nap'): time.sleep(0.3)\n"
        "@pytest.mark.gpus(1)\ndef test_wrong(energy_meter, gpus):\n    use(1)\n"
        "    with energy_meter('nap'): time.sleep(0.3)\n"
    )
    result = run(pytester, source)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_wrong*",
            "*DeviceError: this process uses GPU-b, but the test has leased GPU-a; *",
        ]
    )


def test_contexts_on_the_gpus_of_the_process_are_noted(
    pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch, read_report: Read
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    without_torch(pytester.path)
    source = WITH_CUDA + (
        "@pytest.mark.gpus(1)\ndef test_clean(energy): energy(time.sleep, 0.1)\n"
        "@pytest.mark.gpus(1)\ndef test_plain():\n    global file\n    file = use(0)\n"
        "@pytest.mark.gpus(1)\ndef test_ranks(energy): energy(time.sleep, 0.1)\n"
        "@pytest.mark.gpus(2)\ndef test_both():\n    use(0), use(1)\n"
        "@pytest.mark.gpus(1)\ndef test_first(energy_meter):\n    with energy_meter('nap'): time.sleep(0.3)\n"
    )
    run(pytester, source, "--energy-worker-gpus=2").assert_outcomes(passed=5)
    found = {
        record["id"].rpartition("::")[2]: [
            (flag["severity"], flag["detail"].partition(":")[0])
            for flag in record["flags"]
            if flag["name"] == "gpu-processes"
        ]
        for record in read_report()["records"]
    }
    assert found == {
        "test_clean": [],
        "test_ranks": [],
        "test_first": [("warning", "GPU-b")],
    }
