# SPDX-License-Identifier: Apache-2.0
"""Hosts of a cluster are compared as the host of a local run is: by what they are, not by their names."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.comparability import device_differences, device_facts, fingerprint
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import Record

from ..record.reports import HOST, REPORT
from .runs import record_of, report_of
from .test_comparison import compared

HERE = REPORT.environment
assert HERE is not None
CPU = record_of(devices=["cpu"], boards=[])
#: Where pytest itself runs, such as a login node, which is not measured.
LOGIN = msgspec.structs.replace(HERE, host=msgspec.structs.replace(HOST, cpu_model="Intel Atom"), driver=None)


def node(name: str, *, driver: str | None = "580.1", **changes: Any) -> Environment:
    assert HERE is not None
    return msgspec.structs.replace(
        HERE, host=msgspec.structs.replace(HOST, name=name, **changes), driver=driver
    )


def on(*hosts: Environment) -> Environment:
    return LOGIN.with_hosts({each.host.name: each for each in hosts})


def ranks_on(*names: str, record: Record = CPU) -> Record:
    (rank,) = record.ranks
    ranks = [msgspec.structs.replace(rank, rank=number, host=name) for number, name in enumerate(names)]
    return msgspec.structs.replace(record, ranks=ranks)


PAIR = ranks_on("n1", "n2")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cpu_model": "AMD EPYC 9355"}, "cpu.model: AMD EPYC 9354 -> AMD EPYC 9354, AMD EPYC 9355"),
        ({"logical_cpus": 32}, "cpu.count: 64 -> 32, 64"),
        ({"machine": "aarch64"}, "cpu.machine: x86_64 -> aarch64, x86_64"),
        ({"memory_bytes": 2**37}, "host.memory: 256 GiB -> 128 GiB, 256 GiB"),
    ],
)
def test_another_kind_of_host_is_listed(changes: dict[str, Any], line: str) -> None:
    alike = on(node("n1"), node("n2"))
    assert device_differences(PAIR, PAIR, alike, on(node("n1"), node("n2", **changes))) == [line]
    assert device_differences(PAIR, PAIR, alike, alike) == []


def test_unlike_hosts_are_compared_by_what_they_are_in_whatever_order_they_come() -> None:
    kinds: list[dict[str, Any]] = [{"logical_cpus": 32}, {"memory_bytes": 2**37}, {}]
    runs: list[tuple[Record, Environment]] = []
    for order in itertools.permutations(kinds):
        names = [f"node{len(runs)}-{place}" for place in range(3)]
        hosts = [node(name, **changes) for name, changes in zip(names, order, strict=True)]
        runs.append((ranks_on(*names), on(*hosts)))
    base, base_on = runs[0]
    for head, head_on in runs:
        assert device_differences(base, head, base_on, head_on) == []
    assert len({fingerprint(device_facts(record, where)) for record, where in runs}) == 1


def test_hosts_that_have_each_other_s_parts_are_others() -> None:
    base = on(node("n1", cpu_model="A", logical_cpus=64), node("n2", cpu_model="B", logical_cpus=96))
    head = on(node("n1", cpu_model="A", logical_cpus=96), node("n2", cpu_model="B", logical_cpus=64))
    assert device_differences(PAIR, PAIR, base, head) == ["cpu.count: 64, 96 -> 96, 64"]


def test_a_test_on_the_host_of_pytest_in_a_run_on_a_cluster() -> None:
    assert device_differences(CPU, CPU, LOGIN, on(node("n1"))) == []
    assert device_differences(CPU, CPU, node("n1"), on(node("n1"))) == [
        "cpu.model: AMD EPYC 9354 -> Intel Atom"
    ]


def test_hosts_without_facts_are_not_comparable() -> None:
    assert device_differences(PAIR, PAIR, LOGIN, LOGIN) == ["host: unknown"]
    assert device_differences(PAIR, PAIR, on(node("n1"), node("n2")), on(node("n1"))) == ["host: unknown"]


def test_runs_on_different_hosts_are_not_compared() -> None:
    today = report_of(PAIR, environment=on(node("n1"), node("n2")))
    tomorrow = report_of(ranks_on("n3", "n4"), environment=on(node("n3"), node("n4")))
    larger = report_of(PAIR, environment=on(node("n1"), node("n2", logical_cpus=96)))
    (alike,) = compared(today, tomorrow).comparisons
    assert alike.verdict == "unchanged"
    (found,) = compared(today, larger).comparisons
    assert found.verdict == "not comparable"
    assert found.reason is not None
    assert "cpu.count: 64 -> 64, 96" in found.reason
