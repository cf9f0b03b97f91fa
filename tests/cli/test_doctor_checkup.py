# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: what it finds on a host, what it misses, and its advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.doctor.checkup import Finding, check_host
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.energy.meters import rapl
from pytest_llenergy.energy.meters import rapl as powercap

from ..energy.unprivileged import open_directory, unprivileged
from ..nvml_sim import Board, MigInstance, Process, World
from ..nvml_sim.boards import GIB, MIB
from ..nvml_sim.world import NO_PERMISSION

DRIVER_NOT_LOADED = 9


def doctor(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a new process, because a loaded driver library cannot be replaced."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-m", "pytest_llenergy.cli", "doctor", *args],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def visit(tmp_path: Path, nvml_library: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the doctor on a host with given boards; it returns exit code and output."""

    def make(
        *boards: Board, args: Sequence[str] = (), init_result: int = 0, **variables: str
    ) -> tuple[int, str]:
        world = World(tmp_path / "world", boards, init_result=init_result)
        # No steps: CUDA is not simulated here; test_run_trials covers the steps.
        done = doctor("--no-steps", *args, **world.environment(nvml_library.parent), **variables)
        assert done.stderr == ""
        return done.returncode, done.stdout

    return make


Visit = Callable[..., tuple[int, str]]


def test_the_checkup_names_every_meter_and_backend() -> None:
    text = doctor("--no-steps").stdout
    for line in (
        "meter    estimate for cpu: estimated, cpu:processes by CPU time",
        "meter    hwmon: by name only, --energy-meter=hwmon:ARGUMENT",
        "meter    command: by name only, --energy-meter=command:ARGUMENT",
        "backend  transformers: installed",
    ):
        assert line in text


def test_a_board_is_listed_with_its_energy_counter(visit: Visit) -> None:
    board = Board(
        uuid="GPU-a",
        name="NVIDIA H100 80GB HBM3",
        sensor_window_ns=25_000_000,
        memory_total=81559 * MIB,
        memory_used=1536 * MIB,
        memory_reserved=600 * MIB,
        processes=(Process(os.getpid(), GIB),),
    )
    code, text = visit(board)
    assert code == 0
    assert "driver   580.95.05\ngpu 0    NVIDIA H100 80GB HBM3 GPU-a\n" in text
    assert "         PCI 00000000:17:00.0, 1.5 GiB of 79.6 GiB in use, limit 700 W, MIG off\n" in text
    assert f"         process {os.getpid()} (" in text or "another PID namespace" in text
    assert "visible  CUDA_VISIBLE_DEVICES is not set: GPU-a\n" in text
    assert (
        "meter    nvml for GPU-a: measured, gpu:GPU-a by NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, every " in text
    )
    assert "sees 25% of the time" in text


def test_memory_held_by_no_visible_process_is_reported(visit: Visit) -> None:
    assert (
        "         12 GiB in use by no process that is visible from here\n"
        in visit(Board(memory_used=12 * GIB))[1]
    )


def test_mig_instances_are_listed_under_their_board(visit: Visit) -> None:
    parts = (
        MigInstance("MIG-a", gpu_instance=1),
        MigInstance("MIG-b", 20 * GIB, gpu_slices=2, compute_slices=2),
    )
    code, text = visit(Board(name="NVIDIA H100", mig_enabled=True, mig_instances=parts))
    assert (code, "MIG on" in text) == (0, True)
    assert "         instance MIG-a (1g.10gb), 10 GiB\n         instance MIG-b (2g.20gb), 20 GiB\n" in text


def test_mig_mode_without_instances_is_a_fault(visit: Visit) -> None:
    code, text = visit(Board(uuid="GPU-a", mig_enabled=True))
    assert code == 1
    assert (
        "wrong    GPU-a is in MIG mode without instances and cannot be used (nvidia-smi mig -cgi PROFILE -C "
        "makes instances, nvidia-smi -mig 0 ends the mode)\n"
    ) in text


@pytest.mark.parametrize(
    ("value", "code", "expected"),
    [
        ("GPU-b,GPU-a", 0, "is 'GPU-b,GPU-a': GPU-b, GPU-a\n"),
        (
            "",
            0,
            "is '': no GPU (the environment sets CUDA_VISIBLE_DEVICES='', which allows no GPU; the driver ",
        ),
        ("-1", 0, "is '-1': no GPU (the environment sets "),
        ("0,9", 1, "is '0,9': GPU-a (CUDA_VISIBLE_DEVICES='0,9': '9' is out of range: the driver shows 2, "),
    ],
)
def test_visible_devices_are_listed_with_the_variable(
    visit: Visit, value: str, code: int, expected: str
) -> None:
    done = visit(Board(uuid="GPU-a"), Board(uuid="GPU-b"), CUDA_VISIBLE_DEVICES=value)
    assert done[0] == code
    assert f"visible  CUDA_VISIBLE_DEVICES {expected}" in done[1]


def test_an_element_that_matches_no_device_is_a_named_fault(visit: Visit) -> None:
    _, text = visit(Board(uuid="GPU-a"), CUDA_VISIBLE_DEVICES="GPU-x")
    assert (
        "wrong    CUDA_VISIBLE_DEVICES='GPU-x': 'GPU-x' matches no device that the driver shows; "
        "llenergy doctor "
        "lists the UUIDs\n"
    ) in text


def test_a_driver_that_denies_permission_is_a_fault(visit: Visit) -> None:
    code, text = visit(Board(), init_result=NO_PERMISSION)
    assert (code, "gpu      none\n" in text) == (1, True)
    assert "wrong    NVML: Insufficient Permissions; see nvidia-smi\n" in text


def test_a_lost_board_does_not_hide_the_others(visit: Visit) -> None:
    code, text = visit(Board(lost=True), Board(uuid="GPU-b"), Board(uuid="GPU-c"))
    assert (code, "gpu      none" in text) == (1, False)
    for line in (
        "gpu 1    NVIDIA Sim RTX 4090 GPU-b\n",
        "gpu 2    NVIDIA Sim RTX 4090 GPU-c\n",
        "meter    nvml for GPU-b: measured, ",
        "wrong    NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi\n",
    ):
        assert line in text


def test_a_lease_directory_that_cannot_be_created_is_a_fault(visit: Visit, tmp_path: Path) -> None:
    code, text = visit(LLENERGY_LOCK_DIR=str(tmp_path / "missing" / "locks"))
    assert code == 1
    assert f"wrong    LLENERGY_LOCK_DIR={tmp_path}/missing/locks: No such file or directory; " in text


def test_the_lease_directory_is_named(visit: Visit) -> None:
    assert f"leases   {os.environ['LLENERGY_LOCK_DIR']}: none\n" in visit()[1]


def test_holders_of_leases_are_named(visit: Visit) -> None:
    held = acquire(LockRequest(always=(DeviceLock("GPU-a"),)), 1.0, "bench.py::test_it")
    try:
        text = visit()[1]
    finally:
        held.release()
    assert f"leases   {os.environ['LLENERGY_LOCK_DIR']}: 1\n" in text
    assert f"         GPU-a held by process {os.getpid()} of " in text
    assert " (bench.py::test_it)\n" in text


def test_shared_devices_are_not_listed_as_held(visit: Visit) -> None:
    host = DeviceLock(CPU, shared=True)
    held = acquire(LockRequest(always=(DeviceLock("GPU-a"), DeviceLock("MIG-b"), host)), 1.0, "t")
    try:
        assert f"         GPU-a, MIG-b held by process {os.getpid()} of " in visit()[1]
        held.keep_only({host})
        assert f"leases   {os.environ['LLENERGY_LOCK_DIR']}: none\n" in visit()[1]
    finally:
        held.release()


def test_json_output_has_the_same_facts(visit: Visit) -> None:
    code, text = visit(
        Board(uuid="GPU-a", memory_used=12 * GIB, mig_enabled=True),
        args=["--format=json"],
        CUDA_VISIBLE_DEVICES="0",
    )
    data = json.loads(text)
    (gpu,) = data["gpus"]
    assert (code, data["driver"]) == (1, "580.95.05")
    assert {name: gpu[name] for name in ("uuid", "memory_used_bytes", "power_limit_w", "mig_enabled")} == {
        "uuid": "GPU-a",
        "memory_used_bytes": 12 * GIB,
        "power_limit_w": 700.0,
        "mig_enabled": True,
    }
    assert (gpu["use"]["state"], gpu["use"]["memory_bytes"]) == ("busy", 12 * GIB)
    assert (data["visible"]["variable"], data["visible"]["value"]) == ("CUDA_VISIBLE_DEVICES", "0")
    assert [finding["misconfigured"] for finding in data["findings"]] == [True]
    assert {meter["name"] for meter in data["meters"]} >= {"nvml", "rapl", "estimate"}


class TestWithoutBoards:
    """Hosts with a simulated PCI bus, where NVML reports that the driver is not loaded."""

    @pytest.fixture
    def found(
        self, tmp_path: Path, nvml_attach: Callable[[World], ModuleType]
    ) -> Callable[..., list[Finding]]:
        world = World(tmp_path / "world", [])
        nvml_attach(world).nvmlShutdown()
        world.set_init_result(DRIVER_NOT_LOADED)

        def make(**devices: tuple[str, str]) -> list[Finding]:
            for address, (vendor, kind) in devices.items():
                device = tmp_path / "pci" / address
                device.mkdir(parents=True)
                (device / "vendor").write_text(f"{vendor}\n")
                (device / "class").write_text(f"{kind}\n")
            return list(check_host({}, tmp_path / "pci").findings)

        return make

    def test_a_host_without_a_gpu_is_not_misconfigured(self, found: Callable[..., list[Finding]]) -> None:
        network_card = ("0x15b3", "0x020000")
        assert found(a=network_card, b=("0x10de", "0x040300")) == [
            Finding(
                "no NVIDIA GPU: none on the PCI bus; NVML: Driver Not Loaded; load the NVIDIA kernel module",
                misconfigured=False,
            )
        ]

    def test_a_gpu_without_its_driver_is_a_fault(self, found: Callable[..., list[Finding]]) -> None:
        assert found(first=("0x10de", "0x030200"), second=("0x10de", "0x030000")) == [
            Finding(
                "the PCI bus has NVIDIA graphics at first, second, but NVML: Driver Not Loaded; load the "
                "NVIDIA kernel module; in a container, start it with --gpus all"
            )
        ]

    def test_an_amd_gpu_is_noted_as_not_leasable(
        self, found: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "amdsmi", None)
        _, *notes = found(first=("0x1002", "0x038000"))
        unleasable = (
            "AMD graphics at first: gpus(n) leases NVIDIA GPUs only; --energy-meter=amd measures AMD ones"
        )
        missing = "AMD SMI: amdsmi is missing; pip install 'pytest-llenergy[amd]'"
        assert notes == [Finding(unleasable, misconfigured=False), Finding(missing, misconfigured=False)]


def test_unreadable_counters_are_listed_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_directory() as root:
        zone = root / "intel-rapl:0"
        zone.mkdir()
        for name, text in (("name", "package-0"), ("max_energy_range_uj", "1000000"), ("energy_uj", "5")):
            (zone / name).write_text(text + "\n")
        (zone / "energy_uj").chmod(0o600)
        defaults = {**(rapl.open_rapl.__kwdefaults__ or {}), "powercap_root": root}
        monkeypatch.setattr(rapl.open_rapl, "__kwdefaults__", defaults)
        assert root != powercap.ROOT
        with unprivileged():
            main(["doctor", "--no-steps"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("meter    rapl"))
    assert line.startswith(f"meter    rapl for cpu: no (no permission to read {zone}/energy_uj; ")
    assert line.endswith(f"{rapl.REMEDY})")
