# SPDX-License-Identifier: Apache-2.0
"""Known pitfalls of device visibility, each without and with xdist, with the message that users see."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.processes import sees_all_pids

from ..nvml_sim import Board, MigInstance, World
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION
from .test_run_gpus import BACKEND, CONFTEST

Read = Callable[..., dict[str, Any]]
Run = Callable[..., pytest.RunResult]

A, B, C = "GPU-a1b2c300-51d0-4c1f", "GPU-a1b2c301-51d0-4c1f", "GPU-b7000000-51d0-4c1f"

ONE = """
import pytest
@pytest.mark.gpus(1)
def test_it(energy, backend):
    energy(backend.generate, ["a"])
"""

BOTH = """
import pytest
@pytest.mark.gpus(2)
def test_it(gpus):
    print("LEASED", gpus.visible_devices)
"""


@pytest.fixture(
    params=[pytest.param([], id="alone"), pytest.param(["-n2"], id="xdist", marks=pytest.mark.slow)]
)
def run(
    request: pytest.FixtureRequest, pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Return a function that runs a suite in a new process, with or without xdist."""
    pytester.makeini(
        "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = sleepy\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(BACKEND)

    def call(source: str, *args: str, **variables: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        quiet = ("--energy-report", "-rsP", "-p", "no:cacheprovider")
        return pytester.runpytest_subprocess(*quiet, *request.param, *args)

    return call


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory for self-checks, shared because each check takes a second."""
    return tmp_path_factory.mktemp("checked")


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give, monkeypatch: pytest.MonkeyPatch, checked: Path) -> World:
    """Create three boards of one model that draw 100, 200 and 300 W."""
    monkeypatch.setenv("LLENERGY_CACHE_DIR", str(checked))
    made = World(
        tmp_path / "world",
        [
            Board(uuid=uuid, name="NVIDIA H100", power_w=100.0 * (place + 1), latch_ns=50_000_000)
            for place, uuid in enumerate((A, B, C))
        ],
    )
    for name in ("CUDA_DEVICE_ORDER", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return nvml_children(made)


def needs_torch() -> None:
    """Skip without torch; do not import it, since pytester unloads modules and torch cannot be reloaded."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")


class TestHiddenOnPurpose:
    def test_the_gpus_option_overrides_the_environment(self, run: Run, read_report: Read) -> None:
        run(ONE, "--energy-gpus=2", CUDA_VISIBLE_DEVICES="").assert_outcomes(passed=1)
        assert read_report()["records"][0]["devices"] == [C]


class TestCudaInPytest:
    def test_cuda_is_not_initialised_in_the_processes_of_pytest(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml_library: Path
    ) -> None:
        needs_torch()
        spy = libcuda(tmp_path, nvml_library.parent, monkeypatch)
        result = run(ONE.replace("import pytest", "import pytest, torch"))
        result.assert_outcomes(passed=1)
        assert not spy.exists(), "cuInit was called"
        result = run(
            "import ctypes, pytest\n@pytest.mark.gpus(1)\ndef test_it():\n"
            "    ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
        )
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


class TestNames:
    def test_a_lost_board_or_a_driver_that_refuses_is_no_fault_of_the_option(
        self, run: Run, world: World
    ) -> None:
        world.update(0, lost=True)
        result = run(BOTH, "--energy-gpus=0,1")
        result.assert_outcomes(errors=1)
        assert "--energy-gpus: '0' does not match exactly one GPU; present: " in result.stdout.str()
        world.set_init_result(NO_PERMISSION)
        run("def test_it(): pass", "--energy-gpus=9").assert_outcomes(passed=1)


class TestDeadBoard:
    def test_the_report_describes_the_host_despite_a_lost_board(
        self, run: Run, world: World, read_report: Read
    ) -> None:
        world.update(0, lost=True)
        result = run(ONE)
        result.assert_outcomes(passed=1)
        found = read_report()["environment"]
        assert [board["uuid"] for board in found["gpus"]] == [B, C]
        lost = "NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi"
        assert found["gpus_missing"] == [lost]
        assert (found["driver"], found["host"]["name"]) == ("580.95.05", platform.node())
        assert "pytest" in found["packages"]
        assert f"ERROR: environment: {lost}" in result.stdout.str()


class TestOrder:
    def test_the_energy_is_that_of_the_leased_board(self, run: Run, read_report: Read) -> None:
        run(ONE, CUDA_VISIBLE_DEVICES="2").assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert record["devices"] == [C]
        for round_ in record["rounds"]:
            truth = 300 * round_["duration_s"]
            assert abs(round_["energy_j"] - truth) <= 4 * round_["energy_u_j"]
            assert round_["energy_u_j"] < 0.1 * truth


class TestLocalRank:
    def test_each_rank_sees_one_device_and_the_record_names_it(self, run: Run, read_report: Read) -> None:
        source = ONE.replace("gpus(1)", "gpus(2)").replace(
            'energy(backend.generate, ["a"])',
            f'run = energy(backend.generate, ["a", "b"])\n    assert run.result.texts == ["{C}", "{B}"]',
        )
        run(source, "--energy-gpus=2,1").assert_outcomes(passed=1)
        ranks = read_report()["records"][0]["ranks"]
        assert [(rank["rank"], rank["local_rank"], rank["device"]) for rank in ranks] == [
            (0, 0, C),
            (1, 1, B),
        ]
        assert len({rank["pid"] for rank in ranks}) == 2


class TestMig:
    @pytest.fixture(autouse=True)
    def _divided(self, world: World) -> None:
        parts = (MigInstance("MIG-a", gpu_instance=1), MigInstance("MIG-b", gpu_instance=2))
        world.update(1, mig_enabled=True, mig_instances=parts)

    def test_each_rank_has_an_instance_and_the_energy_is_flagged_as_shared(
        self, run: Run, read_report: Read
    ) -> None:
        source = ONE.replace("gpus(1)", 'gpus(2, mig="1g.10gb")').replace('["a"]', '["a", "b"]')
        run(source).assert_outcomes(passed=1)
        (record,) = read_report()["records"]
        assert [rank["device"] for rank in record["ranks"]] == ["MIG-a", "MIG-b"]
        assert "meter" in {flag["name"] for flag in record["flags"]}


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


class TestForeignProcess:
    def test_a_foreign_process_during_a_round_makes_it_invalid(
        self, run: Run, pytester: pytest.Pytester, read_report: Read, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not sees_all_pids():
            pytest.skip("in a container the PIDs of the driver are meaningless")
        root = str(Path(__file__).parents[2])
        monkeypatch.syspath_prepend(root)
        monkeypatch.setenv("PYTHONPATH", root, prepend=os.pathsep)
        backend = BACKEND.replace("    def run(self): time.sleep(0.5)\n", VISITED.lstrip("\n"))
        (pytester.path / "sleepy.py").write_text("ROUNDS = 0\n" + backend)
        run(ONE)
        (record,) = read_report()["records"]
        flags = [{flag["name"]: flag for flag in round_["flags"]} for round_ in record["rounds"]]
        assert ["gpu-processes" in each for each in flags] == [False, True]
        found = flags[1]["gpu-processes"]
        assert found["severity"] == "invalid"
        assert found["detail"].startswith(f"{A} is used by another process: 1 (")
        assert record["metrics"]["energy_j"]["n"] == 1
