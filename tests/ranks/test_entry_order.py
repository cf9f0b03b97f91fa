# SPDX-License-Identifier: Apache-2.0
"""The order of steps at the entry of a rank, observed in real ranks that form a real process group.

``init_process_group`` before ``set_device`` puts a context of every rank on the first GPU, or hangs NCCL.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host, StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, plan_processes

from .groups import TORCH

#: Replaces what needs a GPU as soon as torch is imported, and writes a line for each step. Ranks use gloo in
#: place of NCCL, so that the process group is real.
RECORD_STEPS = """
import importlib.abc, importlib.util, json, os, stat, sys, types

def note(step, **facts):
    # A forked rank has imported torch before it had a number.
    if rank := os.environ.get("RANK"):
        with open(os.path.join(os.environ["TEST_STEPS"], rank), "a") as file:
            print(json.dumps({"step": step, **facts}), file=file)

def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")

def replace(torch):
    import torch.distributed as dist
    cuda, zeros, init, barrier = torch.cuda, torch.zeros, dist.init_process_group, dist.barrier

    def device_count():
        is_redirected = stat.S_ISREG(os.fstat(1).st_mode)
        note("count devices", visible=visible(), is_redirected=is_redirected)
        return 1
    def touch(*args, device="cpu", **kwargs):
        if device == "cuda":
            note("touch device")
        return zeros(*args, **kwargs)
    def init_process_group(backend, **kwargs):
        note("init_process_group", backend=backend)
        init("gloo", **kwargs)
    def wait_for_all():
        barrier()
        note("barrier", world_size=dist.get_world_size())

    def get_device_properties(index):
        return types.SimpleNamespace(uuid=os.environ.get("TEST_UUID") or visible().partition("-")[2])

    cuda.device_count, torch.zeros = device_count, touch
    cuda.set_device = lambda index: note("set_device", index=index)
    cuda.get_device_properties = get_device_properties
    dist.init_process_group, dist.barrier = init_process_group, wait_for_all

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        note("import torch", visible=visible())
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), replace(module))
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which each rank of the test writes its steps."""
    (tmp_path / "sitecustomize.py").write_text(RECORD_STEPS)
    steps = tmp_path / "steps"
    steps.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TEST_STEPS", str(steps))
    # Must not reach a rank, not even until torch is imported.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return steps


def read_steps(steps: Path, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (steps / str(rank)).read_text().splitlines()]


@pytest.mark.parametrize(
    ("method", "kind", "backend"), [("spawn", "GPU", "nccl"), ("forkserver", "MIG", "gloo")]
)
@pytest.mark.slow
def test_a_rank_chooses_its_device_before_it_joins_the_process_group(
    steps: Path, method: StartMethod, kind: str, backend: str
) -> None:
    devices = (f"{kind}-aaaa", f"{kind}-bbbb")
    plan = plan_processes(TORCH, None, Lease(devices=devices), [0, 1], 1)
    host = LocalHost(method)
    try:
        ranks = RankGroup(plan, {LOCALHOST: host})
        # The ranks are ready; there are no steps after this.
        found = [read_steps(steps, rank.rank) for rank in plan.ranks]
        ranks.close()
    finally:
        host.close()
    for device, taken in zip(devices, found, strict=True):
        # The fork of a process that has imported torch does not import it again.
        imported = [{"step": "import torch", "visible": device}] if method == "spawn" else []
        assert taken == [
            *imported,
            {"step": "count devices", "visible": device, "is_redirected": True},
            {"step": "set_device", "index": 0},
            {"step": "touch device"},
            {"step": "init_process_group", "backend": backend},
            {"step": "barrier", "world_size": 2},
        ]


def test_a_rank_on_another_gpu_than_planned_is_refused_before_it_joins_the_process_group(
    steps: Path, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_UUID", "ffff")
    plan = plan_processes(TORCH, None, Lease(devices=("GPU-aaaa",)), [0], 1)
    plan = dataclasses.replace(plan, process_group=True)
    with pytest.raises(WorkerError, match="the plan gives this rank GPU-aaaa, torch sees GPU-ffff"):
        RankGroup(plan, hosts)
    assert [each["step"] for each in read_steps(steps, 0)][-1] == "touch device"
