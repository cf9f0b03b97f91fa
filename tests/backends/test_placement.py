# SPDX-License-Identifier: Apache-2.0
"""Whole layers on several GPUs of one process: what is planned, passed on, recorded and refused.

Several GPUs are needed for the rest: that the layers then generate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.backends.transformers.parallel import (
    load_onto_devices,
    verify_placement,
)
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.record.record import Parallel

#: Device map of accelerate for a model with four layers on two GPUs.
MAP = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 0,
    "model.layers.2": 1,
    "model.layers.3": 1,
    "model.norm": 1,
    "lm_head": 1,
}


@dataclass
class Parameter:
    device: str


class Placed:
    """A loaded model, as far as it is inspected."""

    def __init__(self, devices: list[str], device_map: Mapping[str, int]) -> None:
        self._devices, self.hf_device_map = devices, device_map

    def parameters(self) -> Iterator[Parameter]:
        return iter([Parameter(device) for device in self._devices])


class Loader:
    """A loader that records its arguments."""

    def from_pretrained(
        self, path: str, *, output_loading_info: bool, **keywords: Any
    ) -> tuple[Placed, dict[str, set[str]]]:
        assert output_loading_info
        self.actual = {"path": path, **keywords}
        return Placed(["cuda:0", "cuda:1"], MAP), {"missing_keys": set(), "mismatched_keys": set()}


def test_one_process_sees_all_devices_of_its_replica() -> None:
    lease = Lease(devices=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    plan = plan_processes(SPEC.capabilities, Parallel(data=2, placement=2), lease, [0, 1])
    assert [rank.devices for rank in plan.ranks] == [("GPU-a", "GPU-b"), ("GPU-c", "GPU-d")]
    assert plan.replica_size == 1, "each process has prompts of its own"


def test_a_cpu_is_refused(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        "import pytest\n@pytest.mark.gpus(2, fallback='cpu')\n@pytest.mark.parallel(placement=2)\n"
        "def test_it(energy, backend):\n    energy(backend.generate, ['a'])\n"
    )
    result = quick.runpytest("--energy-model=random:llama-tiny", "--energy-backend=transformers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["PlanError: placement=2 spreads layers over GPUs; there is one CPU, which holds them all"]
    )


def test_the_device_map_of_transformers_is_recorded() -> None:
    loader = Loader()
    context = RankContext(devices=("GPU-a", "GPU-b"), parallel=Parallel(placement=2))
    _, seen = load_onto_devices(loader, "somewhere", {"dtype": "auto"}, context, "cuda:0")
    assert loader.actual == {"path": "somewhere", "dtype": "auto", "device_map": "balanced"}
    assert seen == {
        "device_map": "balanced",
        "hf_device_map": "; ".join(f"{name}: {device}" for name, device in MAP.items()),
    }


def test_a_device_left_out_by_accelerate_is_an_error() -> None:
    """accelerate leaves out devices that get no layer."""
    with pytest.raises(BackendError, match=r"placement=4 was requested.* are on cuda:0, cuda:1 "):
        verify_placement(Placed(["cuda:0", "cuda:1"], MAP), 4)
