# SPDX-License-Identifier: Apache-2.0
"""Comparability: which devices, meters and workloads are the same, and how differences are listed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.comparability import (
    describe_devices,
    device_differences,
    note_other_gpus,
    work_differences,
    workload_differences,
    workload_key,
)
from pytest_llenergy.record.environment import Board, Environment
from pytest_llenergy.record.load_curve import LoadCurve
from pytest_llenergy.record.record import Parallel, RankInfo, Record, Tokens
from pytest_llenergy.record.served import ServedRequests

from ..record.reports import BOARD, HOST, RECORD, REPORT
from .runs import record_of, round_of

HERE = REPORT.environment
assert HERE is not None


def on(host: dict[str, Any] | None = None, gpus: list[Board] | None = None) -> Environment:
    assert HERE is not None
    changed = msgspec.structs.replace(HOST, **(host or {}))
    return msgspec.structs.replace(HERE, host=changed, gpus=HERE.gpus if gpus is None else gpus)


def board(**changes: Any) -> Board:
    return msgspec.structs.replace(BOARD, **changes)


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ({"cpu_model": "AMD EPYC 9355"}, "cpu.model: AMD EPYC 9354 -> AMD EPYC 9355"),
        ({"machine": "aarch64"}, "cpu.machine: x86_64 -> aarch64"),
        ({"logical_cpus": 8}, "cpu.count: 64 -> 8"),
        ({"memory_bytes": 2**37}, "host.memory: 256 GiB -> 128 GiB"),
    ],
)
def test_different_host_is_listed(host: dict[str, Any], line: str) -> None:
    assert device_differences(RECORD, RECORD, HERE, on(host)) == [line]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "NVIDIA H200"}, "gpu.name: NVIDIA H100 -> NVIDIA H200"),
        ({"memory_bytes": 94 * 2**30}, "gpu.memory: 80.0 GiB -> 94.0 GiB"),
        ({"power_limit_w": 400.0}, "gpu.power_limit: 700 W -> 400 W"),
        ({"power_limit_w": None}, "gpu.power_limit: 700 W -> unknown"),
    ],
)
def test_different_board_is_listed(changes: dict[str, Any], line: str) -> None:
    assert device_differences(RECORD, RECORD, HERE, on(gpus=[board(**changes)])) == [line]


def test_number_of_boards_counts() -> None:
    two = msgspec.structs.replace(RECORD, devices=["GPU-a", "GPU-b"])
    there = on(gpus=[BOARD, board(uuid="GPU-b")])
    assert device_differences(RECORD, two, HERE, there) == ["gpu.count: 1 -> 2"]


def test_mig_instance_differs_from_its_board() -> None:
    part = board(uuid="MIG-1", name="NVIDIA H100 MIG 1g.10gb", memory_bytes=10 * 2**30, power_limit_w=None)
    instance = msgspec.structs.replace(RECORD, devices=["MIG-1"], boards=[part])
    assert device_differences(RECORD, instance, HERE, HERE) == [
        "gpu.name: NVIDIA H100 -> NVIDIA H100 MIG 1g.10gb",
        "gpu.memory: 80.0 GiB -> 10.0 GiB",
        "gpu.power_limit: 700 W -> unknown",
        "gpu.mig: no -> yes",
    ]


def test_meter_counts_by_kind_name_source_and_domain() -> None:
    (meter,) = RECORD.meters
    power = msgspec.structs.replace(meter, source="nvmlDeviceGetPowerUsage integrated")
    other = msgspec.structs.replace(RECORD, meters=[power])
    line = "meter.source: counter -> nvmlDeviceGetPowerUsage integrated"
    assert device_differences(RECORD, other, HERE, HERE) == [line]
    assert device_differences(RECORD, other, HERE, HERE, meters=False) == []
    package = msgspec.structs.replace(RECORD, meters=[msgspec.structs.replace(meter, domain="cpu:package-0")])
    assert device_differences(RECORD, package, HERE, HERE) == ["meter.domain: gpu -> cpu:package-0"]


def test_the_name_of_a_host_in_a_domain_does_not_count() -> None:
    def with_domain(domain: str) -> Record:
        return msgspec.structs.replace(
            RECORD, meters=[msgspec.structs.replace(RECORD.meters[0], domain=domain)]
        )

    assert device_differences(RECORD, with_domain("n2/gpu:GPU-a"), HERE, HERE) == []
    one, other = with_domain("n1/cpu:package-0"), with_domain("n2/cpu:package-0")
    assert device_differences(one, other, HERE, HERE) == []
    assert device_differences(RECORD, one, HERE, HERE) == ["meter.domain: gpu -> cpu:package-0"]


def test_unknown_host_is_not_comparable() -> None:
    assert device_differences(RECORD, RECORD, None, HERE) == ["host: unknown"]
    assert device_differences(RECORD, RECORD, None, None) == ["host: unknown"]


def test_different_board_of_the_same_model_is_a_note() -> None:
    other = msgspec.structs.replace(
        RECORD,
        devices=["GPU-b"],
        meters=[msgspec.structs.replace(RECORD.meters[0], domain="gpu:GPU-b")],
    )
    there = on(gpus=[board(uuid="GPU-b", pci_bus_id="0000:25:00.0")])
    assert device_differences(RECORD, other, HERE, there) == []
    assert note_other_gpus(RECORD, other) == [
        "different GPUs of the same model (GPU-a -> GPU-b), which can differ by 10 % or more"
    ]
    assert note_other_gpus(RECORD, RECORD) == []


def test_devices_are_described_in_one_line() -> None:
    assert describe_devices(RECORD, HERE) == "1x NVIDIA H100 700 W, nvml (measured)"
    bare = msgspec.structs.replace(RECORD, devices=["cpu"], meters=[])
    assert describe_devices(bare, HERE) == "AMD EPYC 9354, no meter"


def backend(**changes: Any) -> dict[str, Any]:
    assert RECORD.backend is not None
    return {"backend": msgspec.structs.replace(RECORD.backend, **changes)}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"params": {"batch_size": 9}}, "params.batch_size: 8 -> 9"),
        (backend(name="openvino"), "backend: transformers -> openvino"),
        (backend(model="n"), "model: m -> n"),
        (backend(model_revision="abc"), "model.revision: None -> abc"),
        (backend(dtype="bfloat16"), "dtype: None -> bfloat16"),
        (backend(options={"compile": True}), "options.compile: False -> True"),
        (backend(prompts_digest="ab12"), "prompts: None -> ab12"),
        (backend(generation={"max_new_tokens": 64}), "generation.max_new_tokens: none -> 64"),
        (
            {"parallel": Parallel(tensor=2)},
            "parallel: data 2, tensor 1, pipeline 1, placement 1 -> "
            "data 1, tensor 2, pipeline 1, placement 1",
        ),
        (
            {"parallel": Parallel(pipeline=2)},
            "parallel: data 2, tensor 1, pipeline 1, placement 1 -> "
            "data 1, tensor 1, pipeline 2, placement 1",
        ),
        (
            {"parallel": Parallel(placement=2)},
            "parallel: data 2, tensor 1, pipeline 1, placement 1 -> "
            "data 1, tensor 1, pipeline 1, placement 2",
        ),
        (backend(task="serve"), "task: None -> serve"),
        ({"devices": ["GPU-a", "GPU-b"]}, "devices: 1 -> 2"),
        ({"fallback": "cpu"}, "fallback: None -> cpu"),
        ({"launch": "backend"}, "launch: ranks -> backend"),
        ({"start_method": "forkserver"}, "start_method: spawn -> forkserver"),
        ({"ranks": [RankInfo(rank=0, local_rank=0, pid=1, device="GPU-a", threads=2)]}, "threads: 1 -> 2"),
        ({"rounds": [round_of(10.0, requests=8)] * 6}, "requests: 2 -> 4"),
        ({"rounds": [round_of(10.0, iterations=1)] * 6}, "requests: 2 -> 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_different_workload_is_listed(changes: dict[str, Any], line: str) -> None:
    base, head = record_of(), record_of(**{"rounds": record_of().rounds, **changes})
    assert line in workload_differences(base, head)
    assert workload_key(base) != workload_key(head)


def test_number_of_iterations_is_not_part_of_the_workload() -> None:
    base = record_of()
    twice = [
        msgspec.structs.replace(each, iterations=4, tokens=type(each.tokens)(input=60, output=32), requests=8)
        for each in base.rounds
        if each.tokens is not None
    ]
    assert workload_differences(base, record_of(rounds=twice)) == []


def test_the_length_of_the_load_that_a_search_ended_with_is_not_part_of_the_workload() -> None:
    """A higher maximum has more requests, and more of the long ones."""

    def searched(requests: int, tokens: int, between: tuple[float, float] | None = (1.0, 64.0)) -> Record:
        each_s = [0.1] * requests
        served = ServedRequests(
            sent_s=each_s,
            time_to_first_token_s=each_s,
            end_to_end_latency_s=each_s,
            output_tokens=[tokens] * requests,
        )
        counted = Tokens(input=2 * requests, output=tokens * requests)
        round_ = round_of(10.0, tokens=counted, requests=requests, iterations=1, served=served)
        return record_of(rounds=[round_] * 6, load_curve=LoadCurve(points=[], between=between))

    base, head = searched(100, 8), searched(140, 9)
    assert workload_differences(base, head) == []
    assert work_differences(base, head, 0.01) == []
    assert work_differences(searched(100, 8, None), searched(100, 9, None), 0.01) == [
        "output tokens per answered request: 8 -> 9 (+12%)"
    ]
