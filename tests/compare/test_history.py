# SPDX-License-Identifier: Apache-2.0
"""``llenergy history``: add runs, show where tests stand and changed, and what gates learn from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.comparability import MeasuredRecord
from pytest_llenergy.compare.history import MIN_SPREAD, StoredEstimator, find_levels
from pytest_llenergy.compare.rule import DEFAULT_RULE
from pytest_llenergy.compare.statistics import SESSION_SPREAD, Sample
from pytest_llenergy.record.environment import environment_key
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, encode_report

from ..record.reports import BOARD, HOST, REPORT
from .runs import TEST, record_of, scaled
from .sessions import commit, day_of, session

GONE = Record(id="t.py::gone", attempt=1, status="skipped", reason="no GPU")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")


def add(*reports: Report, options: Sequence[str] = ()) -> int:
    names = [f"run{number}.json" for number in range(len(reports))]
    for name, report in zip(names, reports, strict=True):
        Path(name).write_bytes(encode_report(report))
    return main(["history", "add", *names, *options])


def keep(factors: Sequence[float], at: str = ".llenergy/history") -> None:
    """Add one session a day of the usual test, which takes these factors of the usual."""
    assert add(*(day_of(day, factor) for day, factor in enumerate(factors)), options=[f"--at={at}"]) == 0


def drawn(count: int, spread: float, seed: int = 5) -> list[float]:
    random = Random(seed)
    return [exp(random.gauss(0.0, spread)) for _ in range(count)]


def files() -> list[Path]:
    return sorted(Path(".llenergy").rglob("*.jsonl"))


Show = Callable[..., Any]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function that returns the only test of ``llenergy history show``, as JSON."""

    def run(*options: str) -> Any:
        capsys.readouterr()
        assert main(["history", "show", "--format=json", *options]) == 0
        (found,) = json.loads(capsys.readouterr().out)["standings"]
        return found

    return run


class TestAdd:
    def test_a_run_is_a_file_with_a_line_for_each_metric(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert add(session(0, record_of(), GONE)) == 0
        assert capsys.readouterr().out == "run0.json: 1 test added in .llenergy/history\n"
        (path,) = files()
        assert path.name == "20260101T030405Z-run-0.jsonl"
        lines = {line["metric"]: line for line in map(json.loads, path.read_text().splitlines())}
        line = lines["energy_j"]
        assert (line["id"], line["commit"], line["run_id"]) == (TEST, commit(0), "run-0")
        assert line["device_key"] == path.parent.name
        assert line["device"] == "1x NVIDIA H100 700 W, nvml (measured)"
        assert line["value"] == pytest.approx(5.0025, abs=1e-3)

    def test_adding_a_run_again_changes_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        add(day_of(0))
        before = [(path, path.read_bytes()) for path in files()]
        capsys.readouterr()
        assert add(day_of(0)) == 0
        assert capsys.readouterr().out == "run0.json: already in .llenergy/history\n"
        assert [(path, path.read_bytes()) for path in files()] == before

    def test_runs_that_cannot_be_measured_again_are_refused_and_the_rest_is_added(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dirty = msgspec.structs.replace(day_of(0).source, dirty=True)
        refused = [
            msgspec.structs.replace(day_of(0), source=dirty),
            session(0, record_of(), complete=False),
            session(0, GONE),
        ]
        assert add(*refused, day_of(1)) == 2
        out, err = capsys.readouterr()
        assert err.splitlines() == [
            "llenergy history: run0.json: commit 0000cccccc has uncommitted changes; --allow-dirty adds the "
            "run anyway",
            "llenergy history: run1.json: the run did not finish; a history has only complete runs",
            "llenergy history: run2.json: none of its 1 tests was measured; nothing to add",
        ]
        assert out == "run3.json: 1 test added in .llenergy/history\n"
        assert add(refused[0], options=["--allow-dirty"]) == 0


def find_changes(values: Sequence[float]) -> list[int]:
    return [level.start for level in find_levels(values)[1:]]


class TestChanges:
    @pytest.mark.parametrize(("step", "least"), [(0.04, 0.85), (0.1, 0.98)])
    def test_a_step_is_found_among_noise_of_a_percent(self, step: float, least: float) -> None:
        found = 0
        for seed in range(200):
            values = drawn(60, 0.01, seed)
            place = 15 + seed % 30
            values[place:] = [value * (1 + step) for value in values[place:]]
            found += any(abs(each - place) <= 3 for each in find_changes(values))
        assert found >= least * 200

    def test_few_changes_are_shown_in_flat_histories(self) -> None:
        assert sum(len(find_changes(drawn(60, 0.01, seed))) for seed in range(200)) <= 0.25 * 200

    def test_steps_are_located_and_one_bad_session_is_none(self) -> None:
        values = [1.0] * 10 + [1.1] * 10 + [1.5] + [1.1] * 9 + [0.9] * 5
        assert find_changes(values) == [10, 30]
        assert find_changes([1.0] * 3 + [1.2] * 5) == [3]

    @pytest.mark.parametrize("values", [[], [1.0] * 4 + [2.0] * 3, [1.0] * 9 + [1.1], [1.0, 1.01] * 9])
    def test_few_sessions_or_small_steps_show_no_change(self, values: list[float]) -> None:
        assert find_changes(values) == []

    def test_a_change_is_reported_with_its_commit(self, show: Show) -> None:
        keep([1.0] * 8 + [1.2] * 4)
        (change,) = show()["changes"]
        assert (change["commit"], change["size"]) == (commit(8), pytest.approx(0.2))


class TestStanding:
    def test_the_last_session_is_beside_the_band_of_those_before(self, show: Show) -> None:
        keep([1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.03])
        found = show()
        # Deviations of 0, 0, 1, 1, 2 and 2 % from the median of six: a scaled one of 1.48 %, times three.
        assert (found["from_usual"], found["band"]) == (
            pytest.approx(0.03, rel=0.02),
            pytest.approx(0.0445, rel=0.02),
        )

    def test_slow_creep_is_seen_against_the_first_sessions(self, show: Show) -> None:
        keep([1.01**day for day in range(30)])
        found = show()
        assert found["sessions"] == 30
        assert found["from_first"] == pytest.approx(1.01**27 - 1, rel=0.05)

    def test_a_change_begins_a_level(self, show: Show) -> None:
        keep([1.0] * 5 + [1.1] * 5)
        found = show()
        assert (found["from_usual"], found["from_first"]) == (pytest.approx(0.0), pytest.approx(0.1))


class TestShow:
    def test_the_table(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        keep([1.0, 1.0, 1.1])
        assert main(["history", "show"]) == 0
        text = capsys.readouterr().out
        assert re.search(r"test_decode\[8\] +0\.6878 J/token +0\.6253 ± 1\.5% +\+10\.0% +\+10\.0% +3", text)
        monkeypatch.setenv("COLUMNS", "80")
        name = "test_long_prompt_decode[8-float16]"
        add(session(3, record_of(f"benchmarks/llm/test_generation.py::{name}")))
        assert main(["history", "show"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(name in line for line in lines)
        assert max(map(len, lines)) <= 80

    def test_a_metric_and_a_test_are_selected(self, show: Show) -> None:
        add(session(0, record_of(), record_of("t.py::other")))
        assert show("other")["metric"] == "energy_per_output_token_j"
        found = show("test_decode[8]", "--metric=output_tokens_per_s")
        assert found["metric"] == "output_tokens_per_s"

    def test_another_workload_or_kind_of_device_starts_again(
        self, show: Show, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keep([1.0] * 4)
        add(*(day_of(day, 3.0, params={"batch_size": 9}) for day in (4, 5)))
        assert show()["sessions"] == 2
        host = msgspec.structs.replace(HOST, cpu_model="Another CPU")
        assert REPORT.environment is not None
        there = msgspec.structs.replace(REPORT.environment, host=host, key=environment_key(host, [BOARD]))
        add(session(6, record_of(joules=scaled(2.0)), environment=there))
        capsys.readouterr()
        main(["history", "show", "--format=json"])
        standings = json.loads(capsys.readouterr().out)["standings"]
        assert sorted(each["sessions"] for each in standings) == [1, 2]
        (key,) = (each["device_key"] for each in standings if each["sessions"] == 1)
        assert show(f"--device={key}")["last"]["run_id"] == "run-6"

    def test_what_cannot_be_shown_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        place = "llenergy history: .llenergy/history: "
        assert main(["history", "show"]) == 2
        assert capsys.readouterr().err == f"{place}it has no session; llenergy history add REPORT adds one\n"
        keep([1.0])
        capsys.readouterr()
        assert main(["history", "show", "test_x"]) == 2
        named = "no session has test_x, energy; llenergy history show lists all tests"
        assert capsys.readouterr().err == f"{place}{named}\n"


def spread_used(root: str, record: Record) -> float:
    rounds, head = Sample(tuple(scaled(1.0))), MeasuredRecord(record, REPORT.environment)
    estimate = StoredEstimator(Path(root))(head, rounds, rounds, DEFAULT_RULE, "energy_j")
    return estimate.design.session_spread


class TestSpreadBetweenSessions:
    @pytest.mark.parametrize("spread", [0.006, 0.03])
    def test_it_is_that_of_the_simulation(self, spread: float) -> None:
        stepped = [value * (1.2 if day >= 60 else 1.0) for day, value in enumerate(drawn(120, spread))]
        stepped[30] *= 1.5
        keep(stepped, "h")
        assert spread_used("h", record_of()) == pytest.approx(spread, rel=0.15)
        assert spread_used("h", record_of("t.py::new")) == spread_used("h", record_of())

    def test_it_needs_eight_sessions_on_the_same_devices(self) -> None:
        keep(drawn(12, 0.006), "h")
        assert spread_used("nowhere", record_of()) == SESSION_SPREAD
        assert spread_used("h", record_of(devices=["cpu"])) == SESSION_SPREAD
        for at, values, expected in (
            ("few", drawn(7, 0.006), SESSION_SPREAD),
            ("calm", [1.0] * 12, MIN_SPREAD),
        ):
            keep(values, at)
            assert spread_used(at, record_of()) == expected

    @pytest.mark.parametrize("before", [3, 4, 5])
    def test_a_step_in_a_history_does_not_hide_a_regression(
        self, before: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Six to ten sessions, of which the first half used 25 % more."""
        keep([1.25] * before + [1.0] * before)
        Path("base.json").write_bytes(encode_report(day_of(40)))
        Path("head.json").write_bytes(encode_report(day_of(41, 1.5)))
        assert main(["compare", "base.json", "head.json", "--metric=energy_j"]) == 1
        assert f"limits allow for {'1.5%' if before == 3 else '0.3%'} between" in capsys.readouterr().out

    def test_sessions_that_differ_widely_decide_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        keep([1.25 ** (day % 3) for day in range(8)])
        Path("base.json").write_bytes(encode_report(day_of(40)))
        Path("head.json").write_bytes(encode_report(day_of(41, 1.2)))
        assert main(["compare", "base.json", "head.json", "--inconclusive=fail"]) == 4
        assert "1 of 1 test inconclusive" in capsys.readouterr().err

    def test_a_broken_history_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        keep(drawn(9, 0.003))
        path = files()[3]
        path.write_text('{"n": 0}\n')
        for name, day in (("base.json", 40), ("head.json", 41)):
            Path(name).write_bytes(encode_report(day_of(day)))
        assert main(["compare", "base.json", "head.json"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"llenergy compare: {path}: broken, or of a newer pytest-llenergy (")
