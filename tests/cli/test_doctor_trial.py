# SPDX-License-Identifier: Apache-2.0
"""Steps in fresh processes: the first failing step is named, whatever ends it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.cli.doctor import probe
from pytest_llenergy.cli.doctor.steps import Step, Trial, advise, list_steps
from pytest_llenergy.cli.doctor.trial import run_trial

from ..nvml_sim import Board, MigInstance
from .conftest import Boards, Torch
from .stand_ins import CUDA, HANGS, REAL

PYTHON = f"Python {platform.python_version()}"
TORCH = f"torch {version('torch')}"
REINSTALL = "reinstall torch, and see LD_LIBRARY_PATH for another copy of its libraries"


def states(made: Trial) -> dict[str, str]:
    return {step.name: step.state for step in made.steps}


def failed(made: Trial) -> Step:
    step = made.first_failure
    assert step is not None
    after = made.steps[made.steps.index(step) + 1 :]
    assert {each.state for each in after} <= {"skipped"}
    assert {each.detail for each in after} <= {f"after the failure of {step.name}", "no GPU"}
    assert "\n" not in made.summary
    return step


def comes_true(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait until something is so, at most for a while. Returns whether it is."""
    deadline_s = time.monotonic() + limit_s
    while not (is_so := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return is_so


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_gone(pid: int) -> bool:
    return comes_true(lambda: has_ended(pid))


@pytest.mark.parametrize("device", [None, "GPU-a"])
def test_every_listed_step_is_implemented(device: str | None) -> None:
    assert set(list_steps(device, ranks=True)) <= set(probe.STEPS)
    alone = probe.ON_CPU if device is None else probe.ON_GPU
    assert list(alone) == [name for name in list_steps(device, ranks=False) if name in alone]


def test_a_working_cpu_passes_every_applicable_step() -> None:
    reported: list[Step] = []
    made = run_trial(None, on_step=reported.append)
    assert states(made) == {
        "process": "ok",
        "NVML": "skipped",
        "driver": "skipped",
        "import torch": "ok",
        "count": "skipped",
        "allocation": "ok",
        "matmul": "ok",
        "convolution": "ok",
        "two ranks with gloo": "ok",
        "NCCL": "skipped",
    }
    assert {step.detail for step in made.steps if step.state == "skipped"} == {"no GPU"}
    assert reported == list(made.steps)
    assert (made.first_failure, made.not_run_reason, made.output) == (None, None, ())
    assert made.summary == (
        "no fault on the CPU: process, import torch, allocation, matmul, convolution, two ranks with gloo; "
        f"{TORCH}, {PYTHON}"
    )


def test_an_illegal_instruction_is_attributed_to_its_step(replace_torch: Torch) -> None:
    replace_torch(REAL + "torch.Tensor.__matmul__ = die")
    made = run_trial(None)
    assert failed(made).name == "matmul"
    assert made.summary == (
        "the step 'matmul' failed on the CPU: killed by SIGILL (illegal instruction); "
        f"{TORCH}, {PYTHON}; "
        "a library was built for another CPU: reinstall it for this one; lscpu lists what it has"
    )
    assert "Fatal Python error: Illegal instruction" in made.output


def test_an_environment_that_is_too_large_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCH_TOO_LONG", "x" * 200_000)
    made = run_trial(None)
    assert failed(made).name == "process"
    assert made.summary == (
        "the step 'process' failed on the CPU: cannot start a process: [Errno 7] Argument list too long: "
        f"{sys.executable!r}; unset variables that are not needed; each must be smaller than 128 KiB"
    )


def test_a_wrong_result_is_a_failure(replace_torch: Torch) -> None:
    replace_torch(
        REAL + "torch.nn.functional.conv2d = lambda *args, real=torch.nn.functional.conv2d: 1 + real(*args)"
    )
    made = run_trial(None)
    assert failed(made).name == "convolution"
    assert made.summary == (
        "the step 'convolution' failed on the CPU: 28800 of 28800 results are wrong; "
        f"{TORCH}, {PYTHON}; reinstall torch"
    )


def test_the_rank_that_dies_is_named_instead_of_the_waiting_one(replace_torch: Torch) -> None:
    replace_torch(REAL + "if os.environ['RANK'] == '1': torch.distributed.all_reduce = die")
    made = run_trial(None)
    assert failed(made).name == "two ranks with gloo"
    assert failed(made).detail == "rank 1 of 2: killed by SIGILL (illegal instruction)"


class TestImport:
    """Faults of the import; none of these tests loads the real torch."""

    @pytest.mark.parametrize(
        ("text", "how"),
        [
            (
                "import ctypes; ctypes.CDLL('libcudart-missing.so.12')",
                "OSError: libcudart-missing.so.12: cannot open shared object file: No such file or directory",
            ),
            ("import torch_missing\n", "ModuleNotFoundError: No module named 'torch_missing'"),
            ("raise ImportError('first line\\nsecond line')", "ImportError: first line"),
            ("import sys; sys.exit('enough')", "SystemExit: enough"),
            ("import os; os._exit(0)", "the process ended with exit code 0 and no answer"),
            ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV (invalid memory access)"),
        ],
    )
    def test_a_failing_import_is_reported_with_its_message(
        self, replace_torch: Torch, text: str, how: str
    ) -> None:
        replace_torch(text)
        made = run_trial(None)
        assert failed(made).name == "import torch"
        assert made.summary == f"the step 'import torch' failed on the CPU: {how}; {PYTHON}; {REINSTALL}"

    def test_the_traceback_of_a_failing_import_is_kept(self, replace_torch: Torch) -> None:
        path = replace_torch("import torch_missing\n")
        assert any(f'File "{path}", line 1' in line for line in run_trial(None).output)

    def test_a_hanging_import_is_killed_with_its_children(self, replace_torch: Torch) -> None:
        path = replace_torch(HANGS)
        made = run_trial(None, timeout_s=10)
        assert made.summary == (
            f"the step 'import torch' failed on the CPU: no answer within 10 s; {PYTHON}; {REINSTALL}"
        )
        assert failed(made).name == "import torch"
        assert all(is_gone(int(pid)) for pid in path.with_name("pids").read_text().split())

    def test_children_of_a_dead_import_are_killed(self, replace_torch: Torch) -> None:
        pids = replace_torch(HANGS.replace("time.sleep(600)", "os._exit(3)")).with_name("pids")
        made = run_trial(None)
        assert failed(made).detail == "the process ended with exit code 3 and no answer"
        child = int(pids.read_text().split()[1])
        try:
            assert is_gone(child)
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def test_without_torch_the_rest_is_skipped_and_nothing_has_failed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        site = str(Path(spec.origin).parents[1])
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != site])
        made = run_trial(None)
        assert made.first_failure is None
        details = {step.name: step.detail for step in made.steps if step.state == "skipped"}
        assert details == {
            **dict.fromkeys(("NVML", "driver", "count", "NCCL"), "no GPU"),
            **dict.fromkeys(
                ("import torch", "allocation", "matmul", "convolution", "two ranks with gloo"),
                "torch is not installed",
            ),
        }

    def test_killing_the_parent_ends_the_steps(self, replace_torch: Torch, tmp_path: Path) -> None:
        pids = replace_torch(HANGS).with_name("pids")
        code = f"from {run_trial.__module__} import run_trial; run_trial(None)"
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)})
        try:
            assert comes_true(lambda: pids.exists() and bool(pids.read_text()))
            process, child = map(int, pids.read_text().split())
            assert list(temporary.iterdir())
        finally:
            parent.kill()
            parent.wait()
        try:
            assert is_gone(process)
            # The child runs in a new session.
            assert is_gone(child)
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        assert comes_true(lambda: not list(temporary.iterdir()))


class TestOnBoards:
    """NVML and the driver's library are stand-ins, and so is a CUDA build of torch where needed."""

    VERSIONS = "driver 580.95.05, CUDA 13.0 in the driver"

    @pytest.mark.parametrize(
        ("code", "how", "what_to_do"),
        [
            (
                803,
                "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803, system has unsupported display driver / cuda driver "
                "combination)",
                "libcuda.so.1 and the kernel module are of different drivers: restart the host after an "
                "update, and remove any other libcuda.so.1 (cuda-compat) from LD_LIBRARY_PATH",
            ),
            (
                999,
                "CUDA_ERROR_UNKNOWN (999, unknown error)",
                "reload the module nvidia_uvm (modprobe -r nvidia_uvm; modprobe nvidia_uvm), or restart "
                "the host; under WSL2, wsl --shutdown",
            ),
            (4711, "error 4711", "see nvidia-smi, and LD_LIBRARY_PATH for another libcuda.so.1"),
        ],
    )
    def test_a_driver_error_is_reported_with_its_text_and_advice(
        self, simulate_boards: Boards, code: int, how: str, what_to_do: str
    ) -> None:
        simulate_boards(Board(uuid="GPU-a"), cuda_init=code)
        made = run_trial("GPU-a")
        assert failed(made).name == "driver"
        assert made.summary == (
            f"the step 'driver' failed on GPU-a: cuInit: {how}; {self.VERSIONS}, {PYTHON}; {what_to_do}"
        )

    def test_a_driver_without_its_library_is_reported(
        self, simulate_boards: Boards, monkeypatch: pytest.MonkeyPatch, nvml_library: Path
    ) -> None:
        simulate_boards(Board(uuid="GPU-a"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent))
        made = run_trial("GPU-a")
        assert made.summary == (
            "the step 'driver' failed on GPU-a: libcuda.so.1: cannot open shared object file: No such file "
            f"or directory; driver 580.95.05, {PYTHON}; install the driver's CUDA library; in a container, "
            "start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )

    def test_a_board_unknown_to_nvml_is_reported(self, simulate_boards: Boards) -> None:
        simulate_boards(Board(uuid="GPU-a"))
        made = run_trial("GPU-x")
        assert failed(made).name == "NVML"
        assert made.summary == (
            "the step 'NVML' failed on GPU-x: NVML: GPU-x does not answer (Not Found); see nvidia-smi -L; "
            f"driver 580.95.05, {PYTHON}; see nvidia-smi"
        )

    def test_nccl_is_skipped_on_a_mig_instance(self, simulate_boards: Boards) -> None:
        parts = (MigInstance("MIG-a", gpu_instance=1),)
        simulate_boards(Board(uuid="GPU-a", mig_enabled=True, mig_instances=parts), cuda_init=999)
        made = run_trial("MIG-a")
        assert made.steps[1].state == "ok"
        assert made.steps[-1] == Step("NCCL", "skipped", "NCCL does not run on MIG instances")

    def test_a_torch_without_cuda_is_reported(self, simulate_boards: Boards) -> None:
        if not version("torch").endswith("+cpu"):
            pytest.skip("torch is built with CUDA")
        simulate_boards(Board(uuid="GPU-a"))
        made = run_trial("GPU-a")
        assert failed(made).name == "count"
        assert made.summary == (
            f"the step 'count' failed on GPU-a: {TORCH} is built without CUDA; {self.VERSIONS}, "
            f"{TORCH}, {PYTHON}; install a torch that is built with CUDA "
            "(https://pytorch.org/get-started)"
        )

    def test_a_cudnn_failure_names_every_version_and_rules_out_process_start(
        self, simulate_boards: Boards, replace_torch: Torch
    ) -> None:
        simulate_boards(Board(uuid="GPU-a"))
        replace_torch(
            CUDA
            + """
def conv2d(*args):
    raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED\\nand a page more")
torch.nn.functional.conv2d = conv2d
"""
        )
        made = run_trial("GPU-a")
        assert states(made)["matmul"] == "ok"
        assert failed(made).name == "cuDNN convolution"
        assert made.summary == (
            "the step 'cuDNN convolution' failed on GPU-a: RuntimeError: cuDNN error: "
            f"CUDNN_STATUS_EXECUTION_FAILED; {self.VERSIONS}, {TORCH}, CUDA 12.8 in torch, cuDNN 9.10.2, "
            f"{PYTHON}; try a torch that is built for CUDA 13, as the driver is; a single process fails, "
            "so it is not how processes are started: reinstall torch with its own cuDNN, and see "
            "LD_LIBRARY_PATH for another one"
        )


def test_a_runtime_newer_than_the_driver_is_reported() -> None:
    versions = {"driver_cuda": "12.4", "torch_cuda": "13.0"}
    assert advise("count", "RuntimeError: the driver is too old", versions) == (
        "update the driver, or install a torch that is built for CUDA 12; see nvidia-smi -L"
    )


def test_runtimes_of_one_major_version_are_compatible() -> None:
    versions = {"driver_cuda": "12.4", "torch_cuda": "12.8"}
    assert advise("allocation", "", versions) == "see nvidia-smi for the state of the board"
