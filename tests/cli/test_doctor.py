# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: what it says of simulated drivers, hosts and libraries, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.doctor import checks
from pytest_llenergy.hosts import gangs

from ..hosts.agents import Launcher
from ..nvml_sim import Board, MigInstance, Process, World
from ..nvml_sim.boards import GIB, MIB
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION


class Visit(NamedTuple):
    code: int
    out: str


Doctor = Callable[..., Visit]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Return a function that runs the doctor; its checks are processes of their own."""

    def run(*arguments: str) -> Visit:
        code = main(["doctor", *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        return Visit(code, out)

    return run


@pytest.fixture
def boards(tmp_path: Path, nvml_children: Give) -> Callable[..., World]:
    """Return a function that shows a driver with these boards to the checks."""

    def show(*found: Board, init_result: int = 0) -> World:
        return nvml_children(World(tmp_path / "world", found, init_result=init_result))

    return show


Boards = Callable[..., World]


def test_a_board_is_listed_with_its_users_and_its_energy_counter(boards: Boards, doctor: Doctor) -> None:
    boards(
        Board(
            uuid="GPU-a",
            name="NVIDIA H100 80GB HBM3",
            sensor_window_ns=25_000_000,
            memory_total=81559 * MIB,
            memory_used=1536 * MIB,
            memory_reserved=600 * MIB,
            processes=(Process(1, GIB),),
        )
    )
    code, out = doctor("--no-steps")
    assert code == 0
    facts = "PCI 00000000:17:00.0, 1.5 GiB of 79.6 GiB in use, limit 700 W"
    assert f"driver   580.95.05\ngpu 0    NVIDIA H100 80GB HBM3 GPU-a, {facts}\n" in out
    assert "gpu 0    process 1 (" in out or "another PID namespace" in out
    assert "visible  CUDA_VISIBLE_DEVICES is not set: GPU-a\n" in out
    counter = "measured, gpu:GPU-a by NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, every "
    (meter,) = (line for line in out.splitlines() if line.startswith("meter    nvml"))
    assert meter.startswith(f"meter    nvml for GPU-a: {counter}")
    assert "sees 25% of the time" in meter


@pytest.mark.clock
def test_each_meter_is_tried(boards: Boards, doctor: Doctor) -> None:
    boards(Board(uuid="GPU-a", power_w=150.0))
    _, out = doctor()
    (meter,) = (line for line in out.splitlines() if line.startswith("meter    nvml for GPU-a"))
    watts = float(meter.removesuffix(" W in a trial").rpartition("; ")[2])
    assert watts == pytest.approx(150.0, rel=0.02)
    (estimate,) = (
        line for line in out.splitlines() if line.startswith("meter    estimate for cpu: estimated")
    )
    assert float(estimate.removesuffix(" W in a trial").rpartition("; ")[2]) > 0
    assert "backend  openvino: installed (openvino_genai 20" in out
    # The torch of these tests is built for the CPU.
    assert "+cpu is built without CUDA; get another at https://pytorch.org/get-started\n" in out


@pytest.mark.slow
def test_hidden_gpus_are_no_fault(boards: Boards, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    boards(Board(uuid="GPU-a"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out = doctor()
    assert "visible  CUDA_VISIBLE_DEVICES='': no GPU (CUDA_VISIBLE_DEVICES=''; " in out
    assert code == 0, out


@pytest.mark.parametrize(
    ("value", "code", "shown"),
    [
        ("GPU-b,GPU-a", 0, "visible  CUDA_VISIBLE_DEVICES='GPU-b,GPU-a': GPU-b, GPU-a\n"),
        ("0,9", 1, "wrong    CUDA_VISIBLE_DEVICES='0,9': '9' does not match exactly one GPU; "),
        (
            "GPU-x",
            1,
            "wrong    CUDA_VISIBLE_DEVICES='GPU-x': 'GPU-x' does not match exactly one GPU",
        ),
    ],
)
@pytest.mark.slow
def test_what_the_environment_hides_is_named(
    boards: Boards, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, value: str, code: int, shown: str
) -> None:
    boards(Board(uuid="GPU-a"), Board(uuid="GPU-b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    visit = doctor("--no-steps")
    assert visit.code == code
    assert shown in visit.out


def test_what_is_wrong_with_boards_does_not_hide_the_others(boards: Boards, doctor: Doctor) -> None:
    parts = (MigInstance("MIG-a", gpu_instance=1), MigInstance("MIG-b", 20 * GIB, gpu_slices=2))
    boards(
        Board(lost=True),
        Board(uuid="GPU-b", name="NVIDIA H100", mig_enabled=True, mig_instances=parts),
        Board(uuid="GPU-d"),
    )
    code, out = doctor("--no-steps")
    assert code == 1
    assert "gpu 1    MIG instance MIG-a (1g.10gb), 10 GiB\n" in out
    assert "gpu 2    NVIDIA Sim RTX 4090 GPU-d, " in out
    assert "meter    nvml for GPU-d: measured, " in out
    assert "wrong    NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi\n" in out


def test_a_driver_that_refuses_is_wrong(boards: Boards, doctor: Doctor) -> None:
    boards(init_result=NO_PERMISSION)
    code, out = doctor("--no-steps")
    assert code == 1
    assert "wrong    NVML: Insufficient Permissions; see nvidia-smi\n" in out


@pytest.mark.slow
def test_a_driver_that_hangs_takes_only_its_own_checks_with_it(
    boards: Boards, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards(Board(uuid="GPU-a")).update(0, call_delay_ns=3_600_000_000_000)
    monkeypatch.setattr(checks, "QUERY_TIMEOUT_S", 3.0)
    monkeypatch.setattr(checks, "METERS_TIMEOUT_S", 12.0)
    code, out = doctor("--no-steps")
    assert code == 1
    assert "wrong    gpus: no answer within 3 s; see nvidia-smi, and the kernel's log (dmesg)\n" in out
    assert "wrong    meters: no answer within 12 s; " in out
    assert "meter    estimate for cpu: estimated, " in out
    assert "backend  openvino: installed" in out


def test_a_library_that_dies_or_fails_on_import_is_wrong(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    (tmp_path / "openvino_genai.py").write_text("print('loading'); raise ImportError('no libopenvino.so')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code, out = doctor()
    assert code == 1
    remedy = "pip install 'pytest-llenergy[{}]'"
    assert f"wrong    backend transformers: ended by SIGILL; {remedy.format('transformers')}\n" in out
    failed = "wrong    backend openvino: ImportError: no libopenvino.so; "
    assert f"{failed}{remedy.format('openvino')}\n" in out
    assert "backend  llama-cpp: installed (xllamacpp " in out


def test_leases_are_listed_with_their_holders(doctor: Doctor, tmp_path: Path) -> None:
    directory = os.environ["LLENERGY_LOCK_DIR"]
    assert f"leases   {directory}: none\n" in doctor("--no-steps").out
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n@pytest.mark.gpus(1, fallback='cpu')\n"
        "def test_it(gpus):\n    print('held', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-sq", "-p", "no:cacheprovider", "test_it.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert any("held" in line for line in holder.stdout)
            out = doctor("--no-steps").out
        finally:
            holder.kill()
    assert f"leases   {directory}: 1\n" in out
    assert f"lease    cpu held by process {holder.pid} of " in out
    assert "test_it.py::test_it" in out


def test_a_lease_directory_that_cannot_be_used_is_wrong(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLENERGY_LOCK_DIR", str(tmp_path / "missing" / "locks"))
    code, out = doctor("--no-steps")
    assert code == 1
    assert f"wrong    LLENERGY_LOCK_DIR: {tmp_path}/missing/locks is no directory to which you may " in out


def test_display_devices_are_found_on_the_bus_without_a_driver(tmp_path: Path) -> None:
    devices = {"a": ("0x15b3", "0x020000"), "b": ("0x10de", "0x030200"), "c": ("0x10de", "0x040300")}
    for address, (vendor, kind) in {**devices, "d": ("0x1002", "0x038000")}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{kind}\n")
    assert checks.list_display_devices(checks.NVIDIA, tmp_path) == ["b"]
    assert checks.list_display_devices(checks.AMD, tmp_path) == ["d"]


def test_json_has_the_same_lines(boards: Boards, doctor: Doctor) -> None:
    boards(Board(uuid="GPU-a"))
    found = json.loads(doctor("--no-steps", "--format=json").out)["lines"]
    shown = doctor("--no-steps").out.splitlines()
    # Tick times are measured.
    assert [f"{each['topic']:<9}{each['text']}".partition(", every ")[0] for each in found] == [
        line.partition(", every ")[0] for line in shown
    ]


def test_a_terminal_gets_lines_of_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", "--no-steps"]
    with subprocess.Popen(command, stdout=follower):
        os.close(follower)
        shown = b""
        # A terminal whose other side is closed ends with an error.
        with suppress(OSError):
            while part := os.read(leader, 1 << 16):
                shown += part
    os.close(leader)
    lines = shown.decode().splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert "model    SmolLM2-135M-Instruct.Q4_1.gguf (default)" in lines
    assert any(line.startswith(" " * 11) for line in lines)


class TestCluster:
    """``--cluster``, with real agents on this host, whose launcher counts what a test says."""

    @pytest.fixture
    def visit(
        self, tmp_path: Path, nvml_library: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
    ) -> Doctor:
        locks = {"LLENERGY_LOCK_DIR": str(tmp_path)}
        world = World(tmp_path / "world", [Board(uuid="GPU-1", name="Small")])
        seen = {**world.environment(nvml_library.parent), **locks}
        blind = {**locks, "LD_LIBRARY_PATH": str(tmp_path)}

        def visit(*sees: bool, devices: int = 1) -> Visit:
            hosts = {f"n{n}": {"environment": seen if each else blind} for n, each in enumerate(sees, 1)}
            monkeypatch.setattr(gangs, "open_cluster", lambda *_: Launcher(hosts, devices=devices))
            return doctor("--cluster=slurm")

        return visit

    def test_fewer_gpus_than_the_launcher_counts_are_wrong(self, visit: Doctor) -> None:
        code, out = visit(True, False)
        first, second, wrong = out.splitlines()
        assert code == 1
        assert first.startswith("host     n1: Python 3.")
        assert "; GPUs: Small; meters: " in first
        assert "nvml (measured)" in first
        assert "; GPUs: none; meters: " in second
        assert wrong.startswith("wrong    n2: 1 GPUs for the launcher, 0 that the driver shows")

    def test_a_launcher_that_counts_no_gpus_although_there_are_some_is_wrong(self, visit: Doctor) -> None:
        code, out = visit(True, devices=0)
        assert code == 1
        counted = "0 GPUs for the launcher, 1 that the driver shows; start the job with --gres=gpu:N"
        assert f"wrong    n1: {counted}\n" in out
        assert visit(False, devices=0).code == 0

    def test_no_cluster_is_one_line(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        code, out = doctor("--cluster=slurm")
        assert code == 1
        assert out.startswith("wrong    ")
        assert "SLURM_JOB_ID is not set" in out
        with pytest.raises(SystemExit):
            doctor("--cluster=local")
