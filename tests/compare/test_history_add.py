# SPDX-License-Identifier: Apache-2.0
"""Adding runs to a history: complete, clean runs, once each."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history.add import add_run
from pytest_llenergy.compare.history.store import Store, read_entries
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, encode_report

from ..record.reports import REPORT
from .runs import TEST, record_of, report_of, round_of
from .sessions import commit, day_of, session

GONE = Record(id="t.py::gone", attempt=1, status="skipped", reason="no GPU")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(report: Report, *options: str) -> int:
    Path("energy.json").write_bytes(encode_report(report))
    return main(["history", "add", "energy.json", *options])


def files() -> list[Path]:
    return sorted(path for path in Path(".llenergy/history").rglob("*") if path.is_file())


def test_run_is_a_file_with_a_line_for_each_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(session(0, record_of(), GONE)) == 0
    message = "energy.json: 1 test added to .llenergy/history, 1 without values left out\n"
    assert capsys.readouterr().out == message
    (path,) = files()
    assert path.name == "20260101T030405Z-run-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["metric"] for line in lines}) == len(lines)
    (line,) = [line for line in lines if line["metric"] == "energy_j"]
    assert (line["id"], line["commit"], line["n"], line["run_id"]) == (TEST, commit(0), 6, "run-0")
    assert line["device_key"] == path.parent.name
    assert line["device"] == "1x NVIDIA H100 700 W, nvml (measured)"
    assert (line["value"], line["low"], line["high"]) == pytest.approx((5.0025, 4.9925, 5.0088), abs=1e-3)
    assert 0 < line["noise"] < 0.01


def test_adding_a_run_again_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(day_of(0))
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files()]
    capsys.readouterr()
    assert run(day_of(0)) == 0
    assert capsys.readouterr().out == "energy.json: run run-0 is already in .llenergy/history\n"
    assert [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files()] == before


def dirty(state: bool | None) -> Report:
    report = day_of(0)
    return msgspec.structs.replace(report, source=msgspec.structs.replace(report.source, dirty=state))


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (
            dirty(True),
            "commit 0000cccccc has uncommitted changes, so it cannot be measured again; --allow-dirty ",
        ),
        (dirty(None), "commit 0000cccccc may have uncommitted changes, so it cannot be measured again; "),
        (
            msgspec.structs.replace(day_of(0), source=msgspec.structs.replace(REPORT.source, commit=None)),
            "the commit is unknown; --allow-dirty adds the run anyway",
        ),
    ],
)
def test_run_without_a_clean_commit_needs_allow_dirty(
    report: Report, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(report) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"llenergy history: energy.json: {message}")
    assert err.count("\n") == 1
    assert not files()
    assert run(report, "--allow-dirty") == 0
    assert len(files()) == 1


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (
            session(0, record_of(), complete=False),
            "the run did not finish; a history has only complete",
        ),
        (
            msgspec.structs.replace(
                day_of(0), run=msgspec.structs.replace(REPORT.run, complete=True, started_at="now")
            ),
            "started_at is 'now', not a time in UTC",
        ),
        (session(0, GONE), "none of its 1 tests was measured; nothing to add"),
        (session(0, record_of(joules=[None] * 6, rounds=[])), "none of its 1 tests was measured"),
    ],
)
def test_run_without_measurements_is_refused(
    report: Report, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(report, "--allow-dirty") == 2
    assert capsys.readouterr().err.startswith(f"llenergy history: energy.json: {message}")
    assert not files()


def test_refused_run_does_not_keep_out_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    for name, report in (("a.json", dirty(True)), ("b.json", day_of(1))):
        Path(name).write_bytes(encode_report(report))
    assert main(["history", "add", "a.json", "none.json", "b.json"]) == 2
    message = capsys.readouterr()
    assert [line.split(": ")[1] for line in message.err.splitlines()] == ["a.json", "none.json"]
    assert message.out == "b.json: 1 test added to .llenergy/history\n"


def test_kinds_of_devices_have_separate_folders() -> None:
    on_cpu = record_of("t.py::cpu", devices=["cpu"])
    run(session(0, record_of(), on_cpu))
    assert len({path.parent.name for path in files()}) == 2
    assert {entry.id for entry in read_entries(Store(Path(".llenergy/history")))} == {TEST, "t.py::cpu"}


def test_a_single_round_and_negative_values_are_stored() -> None:
    rounds = [round_of(10.0, idle_power_w=9.0, idle_power_u_w=0.1)]
    add_run(session(0, record_of(rounds=rounds)), "x", Store(Path("h")))
    found = {entry.metric: entry for entry in read_entries(Store(Path("h")))}
    assert (found["energy_j"].low, found["energy_j"].noise, found["energy_j"].n) == (None, None, 1)
    assert found["net_energy_j"].value == pytest.approx(-4.0)


def test_run_id_is_not_used_as_a_path() -> None:
    report = day_of(0)
    run_info = msgspec.structs.replace(report.run, id="../../x/y")
    add_run(msgspec.structs.replace(report, run=run_info), "x", Store(Path("deep/h")))
    (path,) = Path().rglob("*.jsonl")
    assert path.parent.parent == Path("deep/h")


def test_a_run_is_added_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "here")
    assert store.folders() == []
    reports = [day_of(day) for day in (1, 0)]
    assert [add_run(report, "x", store).new for report in (*reports, *reports)] == [True, True, False, False]
    assert [each.run_id for each in read_entries(store) if each.metric == "energy_j"] == ["run-0", "run-1"]
    assert sorted(each.name for each in (tmp_path / "here").rglob("*.jsonl")) == [
        "20260101T030405Z-run-0.jsonl",
        "20260102T030405Z-run-1.jsonl",
    ]


def test_concurrent_additions_lose_nothing(tmp_path: Path) -> None:
    """Nothing is read to be written, so that no session can be lost."""
    failed: list[Any] = []

    def work(day: int) -> None:
        try:
            add_run(day_of(day), "x", Store(tmp_path / "h"))
            add_run(day_of(0), "x", Store(tmp_path / "h"))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(day,)) for day in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    entries = [entry for entry in read_entries(Store(tmp_path / "h")) if entry.metric == "energy_j"]
    assert [entry.run_id for entry in entries] == [f"run-{day}" for day in range(12)]


def test_unrelated_files_are_ignored() -> None:
    run(day_of(0))
    (path,) = files()
    (path.parent / "README.md").write_text("notes")
    Path(".llenergy/history/notes").mkdir()
    Path(".llenergy/history/notes/x.jsonl").write_text("not ours")
    assert read_entries(Store(Path(".llenergy/history")))


def test_a_store_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    assert run(day_of(0), "--at=taken") == 2
    err = capsys.readouterr().err
    assert err.startswith("llenergy history: taken/")
    assert err.endswith(": Not a directory\n")


@pytest.mark.parametrize("duration_s", [0.0, 5e-324, -1.0, 1e30])
def test_impossible_rounds_do_not_spoil_a_history(
    capsys: pytest.CaptureFixture[str], duration_s: float
) -> None:
    rounds = [round_of(10.0, duration_s=duration_s, idle_power_w=1e30)] * 3
    Path("odd.json").write_bytes(encode_report(report_of(record_of(rounds=rounds, metrics={}))))
    code = main(["history", "add", "odd.json", "--allow-dirty"])
    err = capsys.readouterr().err
    if duration_s == 1e30:
        assert (code, err.count("\n")) == (2, 1)
        assert f"odd.json: {TEST}: impossible " in err
    else:
        assert (code, err) == (0, "")
        assert main(["history", "show"]) == 0
