# SPDX-License-Identifier: Apache-2.0
"""The key of a machine: what makes two runs comparable, and what does not matter."""

from __future__ import annotations

import msgspec
import pytest

from pytest_llenergy.record.environment import environment_key
from pytest_llenergy.record.report import decode_report, encode_report

from .reports import BOARD, HOST, REPORT

KEY = environment_key(HOST, [BOARD])


@pytest.mark.parametrize(
    "changes",
    [{"name": "bench-8"}, {"load_average": 40.0}, {"system": "Linux 6.9"}, {"memory_bytes": 256 * 2**30 - 9}],
)
def test_facts_that_change_between_runs_do_not_change_the_key(changes: dict[str, object]) -> None:
    assert environment_key(msgspec.structs.replace(HOST, **changes), [BOARD]) == KEY


@pytest.mark.parametrize("changes", [{"uuid": "GPU-b"}, {"pci_bus_id": "0000:25:00.0"}])
def test_another_board_of_the_same_kind_does_not_change_the_key(changes: dict[str, object]) -> None:
    assert environment_key(HOST, [msgspec.structs.replace(BOARD, **changes)]) == KEY


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_model": "AMD EPYC 9355"},
        {"machine": "aarch64"},
        {"logical_cpus": 32},
        {"memory_bytes": 128 * 2**30},
    ],
)
def test_each_stable_fact_of_the_host_changes_the_key(changes: dict[str, object]) -> None:
    assert environment_key(msgspec.structs.replace(HOST, **changes), [BOARD]) != KEY


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "NVIDIA H200"},
        {"memory_bytes": 40 * 2**30},
        {"power_limit_w": 500.0},
        {"power_limit_w": None},
    ],
)
def test_each_stable_fact_of_a_board_changes_the_key(changes: dict[str, object]) -> None:
    assert environment_key(HOST, [msgspec.structs.replace(BOARD, **changes)]) != KEY


def test_boards_that_did_not_answer_change_the_key() -> None:
    assert (
        len({KEY, environment_key(HOST, [BOARD], missing=1), environment_key(HOST, [BOARD], missing=2)}) == 3
    )


def test_the_number_of_boards_matters_and_their_order_does_not() -> None:
    other = msgspec.structs.replace(BOARD, name="NVIDIA L4")
    assert (
        len(
            {
                KEY,
                environment_key(HOST, []),
                environment_key(HOST, [BOARD, BOARD]),
                environment_key(HOST, [BOARD, other]),
            }
        )
        == 4
    )
    assert environment_key(HOST, [BOARD, other]) == environment_key(HOST, [other, BOARD])


def test_boards_with_unknown_facts_have_a_key() -> None:
    silent = msgspec.structs.replace(BOARD, memory_bytes=None, power_limit_w=None)
    assert environment_key(HOST, [silent, BOARD]) == environment_key(HOST, [BOARD, silent])


def test_a_report_without_a_cluster_has_no_hosts_and_one_with_a_cluster_keeps_them() -> None:
    here = REPORT.environment
    assert here is not None
    assert here.with_hosts({}) is here
    assert b'"hosts"' not in encode_report(REPORT)
    report = msgspec.structs.replace(
        REPORT, environment=here.with_hosts({"n1": here}).with_hosts({"n2": here})
    )
    again = decode_report(encode_report(report), "again")
    assert again == report
    assert again.environment is not None
    assert dict(again.environment.cluster_hosts) == {"n1": here, "n2": here}
