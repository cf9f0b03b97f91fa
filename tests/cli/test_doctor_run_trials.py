# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor`` runs the steps on each device that it may use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from pytest_llenergy.cli.doctor import trial
from pytest_llenergy.cli.doctor.checkup import Checkup, Leases, VisibleGpus
from pytest_llenergy.cli.doctor.steps import Step, Trial
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.record.environment import Host

from ..nvml_sim import Board
from .conftest import Boards, Torch
from .stand_ins import CUDA

HOST = Host("h", "Linux", "x86_64", "cpu", 2, 10**9, None)

BROKEN = "raise ImportError('libtorch_cpu.so: undefined symbol')"


def doctor(*args: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of the steps, with every duration replaced by ``N``."""
    command = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    lines = re.sub(r"\b[\d.]+ m?s\b", "N", done.stdout).splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith("steps ")), len(lines))
    return done.returncode, lines[start:]


def test_the_first_failing_step_ends_the_steps_and_is_reported(replace_torch: Torch) -> None:
    replace_torch(BROKEN)
    code, lines = doctor()
    assert code == 1
    assert lines[0] == "steps    on the CPU, in fresh processes"
    assert lines[4:8] == [
        "step     import torch: failed after N (ImportError: libtorch_cpu.so: undefined symbol)",
        "step     count: skipped (no GPU)",
        "step     allocation: skipped (after the failure of import torch)",
        "step     matmul: skipped (after the failure of import torch)",
    ]
    assert lines[11].startswith(
        "wrong    the step 'import torch' failed on the CPU: ImportError: libtorch_cpu.so: undefined symbol; "
    )
    assert lines[-2] == "         ImportError: libtorch_cpu.so: undefined symbol"
    assert lines[-1] == "backend  transformers: installed, and cannot run: the step 'import torch' failed"


def test_json_output_has_the_same_steps(replace_torch: Torch) -> None:
    replace_torch(BROKEN)
    command = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    data = json.loads(done.stdout)
    (made,) = data["trials"]
    assert (done.returncode, made["device"]) == (1, None)
    by_name = {step["name"]: step for step in made["steps"]}
    assert by_name["process"]["state"] == "ok"
    assert set(by_name["process"]["versions"]) >= {"python"}
    assert by_name["import torch"]["state"] == "failed"
    assert by_name["matmul"] == {
        "name": "matmul",
        "state": "skipped",
        "detail": "after the failure of import torch",
        "duration_s": None,
        "versions": {},
    }
    (missing,) = (backend["missing"] for backend in data["backends"] if backend["name"] == "transformers")
    assert missing == "installed, and cannot run: the step 'import torch' failed"
    assert data["findings"][-1]["misconfigured"]
    assert data["findings"][-1]["text"].startswith("the step 'import torch' failed on the CPU: ImportError: ")


def test_the_no_steps_option_skips_the_steps(replace_torch: Torch) -> None:
    replace_torch(BROKEN)
    assert doctor("--no-steps") == (0, [])


def test_no_step_runs_on_a_leased_device(replace_torch: Torch) -> None:
    replace_torch(BROKEN)
    held = acquire(LockRequest(always=(DeviceLock(CPU),)), 1.0, "bench.py::test_it")
    try:
        code, lines = doctor()
    finally:
        held.release()
    (line,) = lines
    assert code == 0
    assert line.startswith(
        f"steps    on the CPU: not run, waited N for cpu: held by process {os.getpid()} of "
    )
    assert line.endswith(" (bench.py::test_it)")


def test_after_a_driver_failure_no_step_runs_on_the_other_boards(simulate_boards: Boards) -> None:
    simulate_boards(Board(uuid="GPU-a"), Board(uuid="GPU-b"), cuda_init=803)
    code, lines = doctor()
    assert code == 1
    assert lines[0] == "steps    on GPU-a, in fresh processes"
    assert lines[2] == "step     NVML: ok, N, driver 580.95.05 (NVIDIA Sim RTX 4090)"
    assert lines[3].startswith(
        "step     driver: failed after N (cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803"
    )
    assert lines[11] == "steps    on GPU-b: not run, after the failure of driver on GPU-a"
    assert [line for line in lines if line.startswith("wrong")] == [lines[12]]


def test_steps_with_two_ranks_run_on_the_first_board_with_the_next_as_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def run(device: str | None, *_: object, **options: Any) -> Trial:
        ran.append((device, options.get("ranks", True), options.get("peer")))
        return Trial(device, (Step("process", "ok"),))

    monkeypatch.setattr(trial, "run_trial", run)
    boards = VisibleGpus(None, ("GPU-a", "GPU-b", "GPU-c"))
    host = Checkup(HOST, None, (), (), boards, Leases("", ()), (), (), "m")
    trial.run_trials(host, lambda line: None)
    assert ran == [("GPU-a", True, "GPU-b"), ("GPU-b", False, None), ("GPU-c", False, None)]


@pytest.mark.slow
def test_only_the_first_of_two_boards_takes_the_steps_with_two_ranks(
    simulate_boards: Boards, replace_torch: Torch
) -> None:
    simulate_boards(Board(uuid="GPU-a"), Board(uuid="GPU-b"))
    spec = find_spec("torch")
    assert spec is not None
    replace_torch(CUDA)
    code, lines = doctor()
    assert (code, len(lines)) == (0, 12)
    assert lines[4:6] == [
        f"step     import torch: ok, N, torch {version('torch')}, CUDA 12.8 in torch ({spec.origin})",
        "step     count: ok, N (the requested one)",
    ]
    assert lines[8:] == [
        "step     cuDNN convolution: ok, N, cuDNN 9.10.2 (by cuDNN, all results correct)",
        "step     two ranks with gloo: ok, N (over lo)",
        "step     NCCL: ok, N, NCCL 2.27.5 (two ranks)",
        "steps    on GPU-b: ok up to cuDNN convolution, N",
    ]


def test_with_hidden_boards_the_steps_run_on_the_cpu(
    simulate_boards: Boards, replace_torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_boards(Board(uuid="GPU-a"))
    replace_torch(BROKEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, lines = doctor()
    assert lines[0] == "steps    on the CPU, in fresh processes"
    assert lines[2] == "step     NVML: skipped (no GPU is allowed)"
