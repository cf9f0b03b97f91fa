# SPDX-License-Identifier: Apache-2.0
"""A report with every part filled in."""

from __future__ import annotations

from pytest_llenergy.record.environment import Board, Environment, Host, environment_key
from pytest_llenergy.record.record import (
    BackendInfo,
    DomainEnergy,
    Flag,
    MeterInfo,
    Metric,
    Parallel,
    Phase,
    Procedure,
    RankInfo,
    Record,
    Round,
    Tokens,
    WindowRecord,
)
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool

HOST = Host(
    name="bench-7",
    system="Linux 6.8",
    machine="x86_64",
    cpu_model="AMD EPYC 9354",
    logical_cpus=64,
    memory_bytes=256 * 2**30,
    load_average=0.3,
)
BOARD = Board(
    uuid="GPU-a", name="NVIDIA H100", pci_bus_id="0000:17:00.0", memory_bytes=80 * 2**30, power_limit_w=700.0
)
DOMAIN = DomainEnergy(energy_j=12.5, energy_u_j=0.25, kind="measured", low_j=11.875, high_j=13.125)
NOTE = Flag(name="imprecise", severity="warning", detail="gpu:GPU-a ticked 1 times in 90 ms")
ROUND = Round(
    start_s=100.5,
    duration_s=2.0,
    energy_j=12.5,
    energy_u_j=0.25,
    energy_u_absolute_j=0.5,
    idle_power_w=3.0,
    idle_power_u_w=0.1,
    by_domain={"gpu:GPU-a": DOMAIN},
    phases=[Phase(name="prefill", duration_s=0.01, energy_j=None, energy_u_j=None, reason="not resolvable")],
    tokens=Tokens(input=30, output=16),
    requests=2,
    time_to_first_token_s=0.01,
    inter_token_latency_s=0.02,
    temperature_start_c=41.0,
    other_cpu_s=0.1,
    stolen_cpu_s=0.0,
    flags=[NOTE],
)
RECORD = Record(
    id="benchmarks/test_decode.py::test_decode[8-ünïcode]",
    attempt=1,
    status="measured",
    params={"batch_size": 8, "name": "ünïcode", "cache": True, "limit": None, "top_p": 0.9},
    extra_info={"accuracy": 0.5, "labels": ["a", None], "nested": {"ü": True}},
    backend=BackendInfo(
        name="transformers", version="5.0", model="m", options={"compile": False}, load_s=1.5
    ),
    parallel=Parallel(data=2),
    ranks=[RankInfo(rank=0, local_rank=0, pid=77, device="GPU-a", threads=1, cpus=[0, 1])],
    start_method="spawn",
    launch="ranks",
    start_s=3.2,
    devices=["GPU-a"],
    load_average=0.2,
    procedure=Procedure(
        warmup_iterations=3,
        settled=True,
        criterion="within 5%",
        iterations=2,
        gap_s=0.35,
        target=0.02,
        budget_s=20.0,
        measuring_s=9.5,
        reached=0.015,
    ),
    meters=[
        MeterInfo(
            name="nvml",
            domain="gpu:GPU-a",
            kind="measured",
            source="counter",
            scope="board",
            update_period_s=0.1,
            resolution_j=0.001,
            accuracy="within 5%",
        )
    ],
    rounds=[ROUND],
    windows=[
        WindowRecord(
            name="load",
            start_s=99.0,
            duration_s=1.0,
            energy_j=12.5,
            energy_u_absolute_j=0.5,
            energy_u_j=0.25,
            by_domain={"gpu:GPU-a": DOMAIN},
        )
    ],
    metrics={
        "energy_j": Metric(value=12.5, unit="J", uncertainty=0.25, uncertainty_absolute=0.5, n=1),
        "decode_energy_j": Metric(value=None, unit="J", reason="not resolvable"),
    },
    flags=[NOTE],
)
REPORT = Report(
    schema_version=SCHEMA_VERSION,
    tool=Tool(name="pytest-llenergy", version="0.1.0"),
    run=RunInfo(
        id="0190",
        started_at="2026-01-02T03:04:05Z",
        finished_at=None,
        complete=False,
        argv=["x"],
        exit_status=None,
    ),
    source=Source(commit="abc", branch="main", dirty=True),
    environment=Environment(
        key=environment_key(HOST, [BOARD]),
        host=HOST,
        gpus=[BOARD],
        driver="580.1",
        python="3.11.7",
        packages={"torch": "2.9"},
    ),
    records=[RECORD, Record(id="t.py::gone", attempt=1, status="crashed", reason="rank 0 was killed")],
)
