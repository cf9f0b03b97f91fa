# SPDX-License-Identifier: Apache-2.0
"""One report of several: nothing lost, nothing counted by chance, nothing from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.environment import Board, Environment, environment_key
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.merge import NamedReport, merge_reports
from pytest_llenergy.report.store import Journal, write_report

from ..compare.runs import record_of, report_of, scaled
from ..record.reports import BOARD, HOST, REPORT

ENVIRONMENT = REPORT.environment
assert ENVIRONMENT is not None


def shard(name: str, *ids: str, started: str = "2026-01-02T03:04:05Z", **changes: Any) -> Report:
    report = report_of(*(record_of(each) for each in ids), **changes)
    run = msgspec.structs.replace(
        report.run, id=name, started_at=started, finished_at=started.replace("03:", "04:"), exit_status=0
    )
    return msgspec.structs.replace(report, run=run)


def merged(*reports: Report) -> Report:
    return merge_reports([NamedReport(f"{index}.json", report) for index, report in enumerate(reports)])


def refusal(*reports: Report) -> str:
    with pytest.raises(ReportError) as caught:
        merged(*reports)
    return str(caught.value)


def test_shards_become_one_run_from_the_first_start_to_the_last_end() -> None:
    report = merged(shard("b", "t.py::a", started="2026-01-02T03:05:00Z"), shard("a", "t.py::b"))
    assert [record.id for record in report.records] == ["t.py::a", "t.py::b"]
    assert (report.run.started_at, report.run.finished_at) == ("2026-01-02T03:04:05Z", "2026-01-02T04:05:00Z")
    assert (report.run.complete, report.run.exit_status) == (True, 0)


def test_an_incomplete_or_failed_part_makes_the_merged_run_incomplete_or_failed() -> None:
    part = shard("b", "t.py::b", complete=False)
    failed = msgspec.structs.replace(part.run, exit_status=1, finished_at=None)
    report = merged(shard("a", "t.py::a"), msgspec.structs.replace(part, run=failed))
    assert (report.run.complete, report.run.exit_status, report.run.finished_at) == (False, 1, None)


def test_equal_records_are_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed while it wrote its report: the journal has what the report has."""
    write_report(shard("a", "t.py::a", "t.py::b"), tmp_path / "a.json")
    journal = Journal(tmp_path / "a.x.journal.jsonl")
    journal.add(shard("a"))
    for name in ("t.py::a", "t.py::c"):
        journal.add(record_of(name))
    journal.close(remove=False)
    out = tmp_path / "merged.json"
    assert main(["merge", str(tmp_path / "a.json"), str(journal.path), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 records, complete\n"
    assert [each["id"] for each in json.loads(out.read_text())["records"]] == [
        "t.py::a",
        "t.py::b",
        "t.py::c",
    ]


def test_a_journal_is_complete_at_once_but_synced_no_more_than_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[float] = []
    now_s = 100.0
    monkeypatch.setattr("pytest_llenergy.report.store._fsync", lambda _: synced.append(now_s))
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    journal = Journal(tmp_path / "a.x.journal.jsonl")
    journal.add(shard("a"))
    for now_s in (100.0, 100.9, 101.0, 101.9, 105.0):
        journal.add(record_of(f"t.py::{now_s}"))
        assert f"t.py::{now_s}" in journal.path.read_text()
    journal.close(remove=True)
    assert synced == [100.0, 101.0, 105.0]


def test_a_test_with_different_values_is_refused() -> None:
    other = msgspec.structs.replace(shard("b"), records=[record_of("t.py::a", scaled(1.1))])
    assert refusal(shard("a", "t.py::a"), other) == (
        "t.py::a is in 0.json and, with other values, in 1.json (attempt 1); leave one of them out"
    )


def test_another_commit_is_refused() -> None:
    source = msgspec.structs.replace(REPORT.source, commit="def")
    assert refusal(shard("a", "t.py::a"), shard("b", "t.py::b", source=source)) == (
        "0.json has commit abc, 1.json has def, and a report has one commit; compare them with llenergy "
        "compare"
    )


@pytest.mark.parametrize(
    ("states", "dirty"), [((True, False), True), ((None, False), None), ((False, False), False)]
)
def test_uncommitted_changes_of_one_part_count_for_the_merged_run(
    states: tuple[bool | None, ...], dirty: bool | None
) -> None:
    parts = [
        shard(str(index), f"t.py::{index}", source=msgspec.structs.replace(REPORT.source, dirty=state))
        for index, state in enumerate(states)
    ]
    assert merged(*parts).source.dirty is dirty


def elsewhere(**host: Any) -> Any:
    machine = msgspec.structs.replace(HOST, **host)
    return msgspec.structs.replace(ENVIRONMENT, host=machine, key=environment_key(machine, [BOARD]))  # type: ignore[type-var]


def test_other_hardware_is_refused() -> None:
    other = shard("b", "t.py::b", environment=elsewhere(name="bench-8", logical_cpus=8))
    assert refusal(shard("a", "t.py::a"), other) == (
        "0.json and 1.json ran on different hardware (bench-7 and bench-8), and a report has one kind; merge "
        "them separately"
    )


def test_a_part_of_unknown_hardware_is_refused() -> None:
    assert refusal(shard("a", "t.py::a"), shard("b", "t.py::b", environment=None)) == (
        "1.json does not name its machine; merge it separately"
    )


def test_the_merged_run_lists_boards_and_names_of_all_hosts() -> None:
    board = Board(
        uuid="GPU-b",
        name=BOARD.name,
        pci_bus_id=BOARD.pci_bus_id,
        memory_bytes=BOARD.memory_bytes,
        power_limit_w=BOARD.power_limit_w,
    )
    there = msgspec.structs.replace(
        elsewhere(name="bench-8"), gpus=[board], packages={"torch": "2.8", "numpy": "2.4"}
    )
    found = merged(shard("a", "t.py::a"), shard("b", "t.py::b", environment=there)).environment
    assert found is not None
    assert found.host.name == "bench-7, bench-8"
    assert [each.uuid for each in found.gpus] == ["GPU-a", "GPU-b"]
    assert found.packages == {"torch": "2.9, 2.8", "numpy": "none, 2.4"}


def test_hosts_of_clusters_are_all_kept() -> None:
    here = ENVIRONMENT
    assert here is not None

    def on(**hosts: Environment) -> Environment:
        return here.with_hosts(hosts)

    report = merged(
        shard("a", "t.py::a", environment=on(n1=here, n2=here)),
        shard("b", "t.py::b", environment=on(n2=here, n3=here)),
        shard("c", "t.py::c"),
    )
    assert report.environment is not None
    assert list(report.environment.cluster_hosts) == ["n1", "n2", "n3"]
