# SPDX-License-Identifier: Apache-2.0
"""Tests with a ``gpus`` mark on simulated boards: the real pynvml with a stand-in for the driver.

A backend without a framework runs in the ranks, so that everything except CUDA is real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.processes import sees_all_pids

from ..nvml_sim.boards import MigInstance
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION, Board, World

Read = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

BACKEND = """
import os
import time
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def __init__(self, prompts): self.prompts = prompts
    def run(self): time.sleep(0.5)
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=1, output_tokens=1) for _ in self.prompts]
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        ids = [[0] for _ in self.prompts]
        return Generation(texts=[visible] * len(self.prompts), token_ids=ids, requests=requests)

class Sleepy:
    def load(self, model, options, context):
        return BackendInfo(name="sleepy", version="1", model=model.label)
    def prepare(self, prompts, params): return Job(prompts)
    def synchronize(self): pass
    def close(self): pass

SPEC = BackendSpec("sleepy", "sleepy:Sleepy", (), "pip install sleepy", Capabilities(data=True, gpu=True))
"""

ONE = """
import pytest
@pytest.mark.gpus(1)
def test_it(energy, backend):
    energy(backend.generate, ["a"])
"""

CONFTEST = "def pytest_llenergy_backends(config):\n    import sleepy\n    return [sleepy.SPEC]\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = sleepy\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(BACKEND)
    return pytester


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    boards = [
        Board(name="NVIDIA H200", power_w=100, latch_ns=50_000_000),
        Board(name="NVIDIA L40S", power_w=40, latch_ns=50_000_000),
    ]
    return nvml_children(World(tmp_path / "world", boards))


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    # A separate process, because a loaded driver library cannot be replaced.
    return suite.runpytest_subprocess("--energy-report", "-rs", "-p", "no:cacheprovider", *args)


def test_the_leased_board_is_measured(suite: pytest.Pytester, world: World, read_report: Read) -> None:
    suite.makepyfile(
        """
        import pytest
        @pytest.mark.gpus(1, name="L40S")
        def test_second(energy, backend, gpus):
            run = energy(backend.generate, ["a"])
            assert run.result.texts == [gpus.visible_devices] == list(gpus.uuids)
            assert (gpus.names, gpus.indices) == (("NVIDIA L40S",), (1,))
        @pytest.mark.gpus(2)
        def test_both(energy, backend, gpus):
            run = energy(backend.generate, ["a", "b"])
            assert run.result.texts == list(gpus.uuids)
        """
    )
    run(suite).assert_outcomes(passed=2)
    second, both = read_report()["records"]
    uuids = [board["uuid"] for board in read_report()["environment"]["gpus"]]
    assert second["devices"] == [uuids[1]]
    assert [(rank["local_rank"], rank["device"]) for rank in both["ranks"]] == [*enumerate(uuids)]
    for record, watts in ((second, 40), (both, 140)):
        assert {meter["name"] for meter in record["meters"]} == {"nvml"}
        assert {(meter["kind"], meter["exclusive"]) for meter in record["meters"]} == {("measured", True)}
        assert 0 <= record["lease_wait_s"] < 60
        assert all(round_["temperature_start_c"] is not None for round_ in record["rounds"])
        # On a busy machine, a board may not be read near the edges of a round.
        known = [round_ for round_ in record["rounds"] if round_["energy_j"] is not None]
        for round_ in known:
            assert abs(round_["energy_j"] - watts * round_["duration_s"]) <= 4 * round_["energy_u_j"]
        assert min(round_["energy_u_j"] / round_["energy_j"] for round_ in known) < 0.15
    assert set(both["rounds"][0]["by_domain"]) == {f"gpu:{uuid}" for uuid in uuids}


def test_a_board_without_readings_gives_a_reason_instead_of_energy(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    world.update(0, energy_supported=False, scopes=(), power_usage_supported=False)
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy, backend):\n"
        "    assert energy(backend.generate, ['a']).duration_s > 0.4\n"
    )
    run(suite).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["status"] == "invalid"
    assert record["rounds"][0]["energy_j"] is None
    assert "reports neither energy nor power" in record["reason"]


def test_a_backend_without_gpu_support_is_skipped_instead_of_run_on_the_cpu(
    suite: pytest.Pytester, world: World
) -> None:
    (suite.path / "sleepy.py").write_text(BACKEND.replace("gpu=True", "gpu=False"))
    suite.makepyfile(ONE)
    result = run(suite)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*sleepy does not run on GPUs here"])


def test_unknown_processes_are_a_flag_not_a_failure(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    for index in range(2):
        world.update(index, processes_supported=False)
    suite.makepyfile(ONE)
    run(suite).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    (flag,) = (flag for flag in record["flags"] if flag["name"] == "gpu-processes")
    assert flag["severity"] == "warning"
    assert "the driver does not report the processes on the board" in flag["detail"]


def test_each_rank_has_an_instance_and_the_energy_is_flagged_as_shared(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    parts = (MigInstance("MIG-a", gpu_instance=1), MigInstance("MIG-b", gpu_instance=2))
    world.update(1, mig_enabled=True, mig_instances=parts)
    suite.makepyfile(ONE.replace("gpus(1)", "gpus(2)").replace('["a"]', '["a", "b"]'))
    run(suite, "--energy-gpus=MIG-a,MIG-b").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert [rank["device"] for rank in record["ranks"]] == ["MIG-a", "MIG-b"]
    assert "meter" in {flag["name"] for flag in record["flags"]}


def test_a_lost_board_or_a_driver_that_refuses_is_no_fault_of_the_option(
    suite: pytest.Pytester, world: World
) -> None:
    world.update(0, lost=True)
    suite.makepyfile("import pytest\n@pytest.mark.gpus(2)\ndef test_it(gpus): pass\n")
    result = run(suite, "--energy-gpus=0,1")
    result.assert_outcomes(errors=1)
    assert "--energy-gpus: '0' does not match exactly one GPU; present: " in result.stdout.str()
    world.set_init_result(NO_PERMISSION)
    suite.makepyfile("def test_it(): pass")
    run(suite, "--energy-gpus=9").assert_outcomes(passed=1)


def test_cuda_is_not_initialised_in_the_processes_of_pytest(
    suite: pytest.Pytester,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvml_library: Path,
) -> None:
    # Not imported here: pytester unloads modules, and torch cannot be loaded again.
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    spy = libcuda(tmp_path, nvml_library.parent, monkeypatch)
    suite.makepyfile(ONE.replace("import pytest", "import pytest, torch"))
    run(suite).assert_outcomes(passed=1)
    assert not spy.exists(), "cuInit was called"
    suite.makepyfile(
        "import ctypes, pytest\n@pytest.mark.gpus(1)\ndef test_it():\n"
        "    ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
    )
    run(suite)
    assert spy.exists(), "the stand-in does not detect cuInit"


def libcuda(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a libcuda.so.1 that creates a file when it is initialised; return the file's path."""
    compiler, spy = shutil.which("cc"), tmp_path / "cuInit"
    assert compiler
    code = tmp_path / "cuda.c"
    code.write_text(
        "#include <stdio.h>\n"
        f'int cuInit(unsigned flags) {{ (void)flags; fclose(fopen("{spy}", "w")); return 100; }}\n'
    )
    directory = tmp_path / "cuda"
    directory.mkdir()
    subprocess.run([compiler, "-shared", "-fPIC", "-o", directory / "libcuda.so.1", code], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{directory}:{folder}")
    return spy


#: A rank that uses the board, together with the foreign process 1 in the second round.
VISITED = """
    def run(self):
        from tests.nvml_sim import Process, World
        global ROUNDS
        ROUNDS += 1
        with World.open(os.environ["NVML_SIM_WORLD"]) as world:
            others = (Process(1),) if ROUNDS == 2 else ()
            world.update(0, processes=(Process(os.getpid()), *others))
            # Boards are looked at every half a second, or later on a busy machine.
            time.sleep(3.0)
            world.update(0, processes=(Process(os.getpid()),))
"""


def test_a_foreign_process_during_a_round_makes_it_invalid(
    suite: pytest.Pytester, world: World, read_report: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sees_all_pids():
        pytest.skip("in a container the PIDs of the driver are meaningless")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    backend = BACKEND.replace("    def run(self): time.sleep(0.5)\n", VISITED.lstrip("\n"))
    (suite.path / "sleepy.py").write_text("ROUNDS = 0\n" + backend)
    suite.makepyfile(ONE)
    run(suite)
    (record,) = read_report()["records"]
    flags = [{flag["name"]: flag for flag in round_["flags"]} for round_ in record["rounds"]]
    assert ["gpu-processes" in each for each in flags] == [False, True]
    found = flags[1]["gpu-processes"]
    assert found["severity"] == "invalid"
    assert found["detail"].startswith(f"{world.board(0).uuid} is used by another process: 1 (")
    assert record["metrics"]["energy_j"]["n"] == 1
