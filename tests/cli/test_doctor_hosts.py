# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor --cluster`` with real agents on this host, one of which sees another driver or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import host_facts, launchers
from pytest_llenergy.hosts.base import HostOffer

from ..hosts.agents import WITH_TRIAL, Launcher
from ..nvml_sim import Board, World


class EndedLauncher(Launcher):
    def offers(self) -> Sequence[HostOffer]:
        raise WorkerError("Slurm job 7 is NODE_FAIL")


def test_fewer_gpus_than_the_launcher_counts_and_differences_are_named(
    tmp_path: Path,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as end:
        world = end.enter_context(World(tmp_path / "world", [Board(uuid="GPU-1", name="Small")]))
        seen = {**world.environment(nvml_library.parent), "LLENERGY_LOCK_DIR": str(tmp_path)}
        blind = {"LLENERGY_LOCK_DIR": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
        cluster = Launcher({"n1": {"environment": seen}, "n2": {"environment": blind}})
        monkeypatch.setattr(launchers, "open_cluster", lambda *_: cluster)
        assert main(["doctor", "--cluster=slurm"]) == 1
    out = capsys.readouterr().out
    assert "host     n1: Python " in out
    assert "         wrong: GPUs: 1 for the launcher, none that the driver shows: " in out
    assert out.count("wrong: ") == 1
    (differ,) = [line for line in out.splitlines() if line.startswith("note     hosts differ in ")]
    assert "GPUs: Small 700 W (n1), none (n2)" in differ
    assert "none (n2)" in differ.partition("driver: ")[2]
    assert "by gloo, all_reduce of 64 MiB over n1 (" in out


def test_a_launcher_that_counts_no_gpus_although_there_are_some(
    tmp_path: Path,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with World(tmp_path / "world", [Board(uuid="GPU-1"), Board(uuid="GPU-2")]) as world:
        seen = {**world.environment(nvml_library.parent), "LLENERGY_LOCK_DIR": str(tmp_path)}
        monkeypatch.setattr(
            launchers, "open_cluster", lambda *_: Launcher({"n1": {"environment": seen}}, devices=0)
        )
        assert main(["doctor", "--cluster=slurm"]) == 1
        blind = {"LLENERGY_LOCK_DIR": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
        monkeypatch.setattr(
            launchers, "open_cluster", lambda *_: Launcher({"n1": {"environment": blind}}, devices=0)
        )
        assert main(["doctor", "--cluster=ray"]) == 0
    out = capsys.readouterr().out
    fault = "GPUs: none for the launcher, 2 that the driver shows; start the job with --gres=gpu:N"
    assert [line for line in out.splitlines() if "wrong: " in line] == [f"         wrong: {fault}"]


def test_a_terminal_gets_lines_that_fit_with_whole_words(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    monkeypatch.setenv("COLUMNS", "80")
    leader, follower = os.openpty()
    with World(tmp_path / "world", [Board(uuid=uuid)]) as world, os.fdopen(follower, "w") as terminal:
        seen = {**world.environment(nvml_library.parent), "LLENERGY_LOCK_DIR": str(tmp_path)}
        monkeypatch.setattr(launchers, "open_cluster", lambda *_: Launcher({"n1": {"environment": seen}}))
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["doctor", "--cluster=slurm"]) == 0
        monkeypatch.undo()
    data = b""
    # A terminal whose other side is closed ends with an error.
    with suppress(OSError):
        while part := os.read(leader, 1 << 16):
            data += part
    os.close(leader)
    out = data.decode()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80, out
    assert f"meter nvml for {uuid}: measured," in " ".join(out.split())
    assert any(line.startswith(" " * 11) for line in lines), out


@pytest.mark.parametrize(
    ("name", "message"),
    [("foo", "needs slurm, ray or ray:HOST:PORT"), ("local", "this host is checked without --cluster")],
)
def test_a_name_of_no_cluster(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", f"--cluster={name}"])
    assert capsys.readouterr().err.endswith(f"argument --cluster: {message}\n")


def test_a_job_that_has_ended_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launchers, "open_cluster", lambda *_: EndedLauncher({}))
    assert main(["doctor", "--cluster=slurm"]) == 1
    assert capsys.readouterr().err == "llenergy doctor --cluster=slurm: Slurm job 7 is NODE_FAIL\n"


def test_hosts_without_torch_can_be_used(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = "lambda name: None if name == 'torch' else '1.0'"
    patch = f"from pytest_llenergy.hosts import host_facts\nhost_facts.installed_version = {without}"
    program = f"{WITH_TRIAL}\n{patch}"
    monkeypatch.setattr(host_facts, "installed_version", lambda name: None if name == "torch" else "1.0")
    with World(tmp_path / "world", [Board(uuid="GPU-1")]) as world:
        seen = {**world.environment(nvml_library.parent), "LLENERGY_LOCK_DIR": str(tmp_path)}
        hosts = {name: {"environment": seen, "program": program} for name in ("n1", "n2")}
        monkeypatch.setattr(launchers, "open_cluster", lambda *_: Launcher(hosts))
        assert main(["doctor", "--cluster=slurm"]) == 0
    assert "network  not measured: torch is not installed on n1, n2\n" in capsys.readouterr().out
