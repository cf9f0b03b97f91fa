# SPDX-License-Identifier: Apache-2.0
"""The spread between sessions, against the values it was simulated with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import exp, pi, sqrt
from pathlib import Path
from random import Random

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history.add import accept_step, add_run, load_accepted_steps
from pytest_llenergy.compare.history.spread import (
    MAX_SPREAD,
    MIN_SPREAD,
    StoredEstimator,
    pooled_spread,
    session_spread,
    session_spreads,
)
from pytest_llenergy.compare.history.store import Acceptance, Store, read_entries
from pytest_llenergy.compare.rule import DEFAULT_RULE
from pytest_llenergy.compare.statistics import SESSION_SPREAD, Sample
from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.gating import Gating
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.record.defaults import HISTORY
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, encode_report

from ..record.reports import REPORT
from .runs import record_of, scaled
from .sessions import commit, day_of, series_of, session


def spread_of(values: Sequence[float], noise: float | None = None) -> float:
    found = session_spread(series_of(values, noise))
    assert found is not None
    return found


def drawn(random: Random, count: int, spread: float) -> list[float]:
    return [exp(random.gauss(0.0, spread)) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.003, 0.01, 0.05])
def test_spread_is_that_of_the_simulation(spread: float) -> None:
    assert spread_of(drawn(Random(1), 400, spread)) == pytest.approx(spread, rel=0.1)


def test_few_sessions_are_right_on_average() -> None:
    random = Random(2)
    squares = [spread_of(drawn(random, 8, 0.01)) ** 2 for _ in range(500)]
    # Rather too large than too small.
    assert 0.01 <= sqrt(sum(squares) / 500) <= 0.0125


def test_changes_and_outliers_do_not_count() -> None:
    values = drawn(Random(3), 200, 0.01)
    values[20::30] = [2.0] * len(values[20::30])
    stepped = [value * (1.0, 1.1, 0.8, 1.3)[place // 50] for place, value in enumerate(values)]
    assert spread_of(stepped) == pytest.approx(0.01, rel=0.15)


def test_noise_of_rounds_is_subtracted() -> None:
    noise = 0.02
    total = sqrt(0.01**2 + pi / 2 * noise**2 / 8)
    assert spread_of(drawn(Random(4), 400, total), noise) == pytest.approx(0.01, rel=0.1)
    assert spread_of([1.0, 1.001, 0.999, 1.0] * 2, noise) == 0.0


@pytest.mark.parametrize("values", [[], [1.0, 1.1, 0.9] * 2, [1.0] * 7, [1.0] * 7 + [-1.0]])
def test_too_few_or_negative_sessions_have_no_spread(values: list[float]) -> None:
    assert session_spread(series_of(values)) is None


def test_accepted_steps_do_not_count_where_none_is_found() -> None:
    values = [1.0, 1.01, 1.5, 1.51, 2.0, 2.01, 3.0, 3.01]
    assert spread_of(values) > 0.2
    steps = [
        Acceptance(schema_version=1, commit=commit(day), tests=["t.py::t"], reason="x", time="2026")
        for day in (2, 4, 6)
    ]
    found = session_spread(series_of(values), steps)
    assert found is not None
    assert found < 0.02


@pytest.mark.parametrize("before", [3, 4, 5])
def test_a_step_in_a_history_does_not_hide_a_regression(
    before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six to ten sessions, of which the first half used 25 % more."""
    monkeypatch.chdir(tmp_path)
    store = Store(Path(".llenergy/history"))
    for day in range(2 * before):
        add_run(day_of(day, 1.25 if day < before else 1.0), "main.json", store)
    Path("base.json").write_bytes(encode_report(day_of(40)))
    Path("head.json").write_bytes(encode_report(day_of(41, 1.5)))
    assert main(["compare", "base.json", "head.json", "--metric=energy_j"]) == 1
    assert f"limits allow for {'1.5%' if before == 3 else '0.3%'} between" in capsys.readouterr().out


def test_sessions_that_differ_widely_do_not_open_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(Path(".llenergy/history"))
    for day in range(8):
        add_run(day_of(day, 1.25 ** (day % 3)), "main.json", store)
    changes = {1.5: "regressed", 0.7: "improved", 0.9: "unchanged", 1.0: "inconclusive"}
    for factor, verdict in changes.items():
        Path("base.json").write_bytes(encode_report(day_of(40)))
        Path("head.json").write_bytes(encode_report(day_of(41, factor)))
        assert main(["compare", "base.json", "head.json", "--metric=energy_j"]) == (verdict == "regressed")
        out = " ".join(capsys.readouterr().out.split())
        assert f"{verdict}: test_decode.py::test_decode[8]: " in out
        assert re.search(r"differ by \d+%, and limits allow for 5%; llenergy ab decides", out)
        assert "limits allow for 5.0% between sessions" in out


def test_spreads_of_a_history_are_by_test(tmp_path: Path) -> None:
    store, random = Store(tmp_path), Random(5)
    for day in range(30):
        records = [record_of("t.py::a", scaled(exp(random.gauss(0, 0.02))))]
        records += [record_of("t.py::b", scaled(exp(random.gauss(0, 0.04) + 0.7 * (day > 14))))]
        records += [record_of("t.py::new", scaled(1.0))] * (day > 27)
        add_run(session(day, *records), "x", store)
    key = read_entries(store)[0].device_key
    spreads = session_spreads(store, metric="energy_j", device_key=key)
    assert spreads == {"t.py::a": pytest.approx(0.02, rel=0.3), "t.py::b": pytest.approx(0.04, rel=0.3)}
    assert pooled_spread(spreads) == pytest.approx(0.03, rel=0.3)
    accept_step(store, commit(15), "larger model", ["b"])
    assert session_spreads(store, metric="energy_j", device_key=key) == spreads
    assert session_spreads(store, metric="energy_j", device_key="0" * 12) == {}
    assert pooled_spread({}) is None


def write_history(place: Path, spread: float, sessions: int = 12) -> Store:
    store = Store(place)
    for day, factor in enumerate(drawn(Random(5), sessions, spread)):
        add_run(day_of(day, factor), "main.json", store)
    return store


def rewrite_all(place: Path, old: str, new: str) -> None:
    for file in place.rglob("*.jsonl"):
        file.write_text(file.read_text().replace(old, new))


def spread_used(store: Store | None, record: Record) -> float:
    rounds = Sample(tuple(scaled(1.0)))
    found = StoredEstimator(store, REPORT.environment, print)(
        record, rounds, rounds, DEFAULT_RULE, "energy_j"
    )
    return found.session_spread


def test_limits_of_a_stored_baseline_are_learned_from_the_history(tmp_path: Path) -> None:
    store = write_history(tmp_path, 0.006)
    learned = spread_used(store, record_of())
    assert learned == pytest.approx(0.006, rel=0.5)
    assert spread_used(store, record_of("t.py::new")) == learned, "the typical spread of the history"
    assert spread_used(None, record_of()) == SESSION_SPREAD
    elsewhere = record_of(devices=["cpu"])
    assert spread_used(store, elsewhere) == SESSION_SPREAD, "other devices"
    assert spread_used(write_history(tmp_path / "few", 0.006, 7), record_of()) == SESSION_SPREAD
    assert spread_used(write_history(tmp_path / "wild", 0.4), record_of()) == MAX_SPREAD
    other = write_history(tmp_path / "units", 0.006)
    rewrite_all(tmp_path / "units", '"unit":"J"', '"unit":"kJ"')
    assert spread_used(other, record_of()) == SESSION_SPREAD, "another unit"
    assert spread_used(write_history(tmp_path / "calm", 0.0), record_of()) == MIN_SPREAD


def test_a_gate_learns_from_sessions_on_the_hosts_of_each_test(pytester: pytest.Pytester) -> None:
    """Hosts of two kinds, and none of them runs pytest."""
    login = REPORT.environment
    assert login is not None
    hosts = {
        name: msgspec.structs.replace(login, host=msgspec.structs.replace(login.host, logical_cpus=cpus))
        for name, cpus in (("n1", 32), ("n2", 96))
    }
    (rank,) = record_of().ranks

    def on(name: str, factor: float = 1.0) -> Record:
        return record_of(f"t.py::{name}", scaled(factor), ranks=[msgspec.structs.replace(rank, host=name)])

    def run_of(day: int, *records: Record) -> Report:
        return session(day, *records, environment=login.with_hosts(hosts))

    store = Store(pytester.path / HISTORY)
    factors = {name: drawn(Random(5), 12, spread) for name, spread in (("n1", 0.006), ("n2", 0.03))}
    for day in range(12):
        add_run(run_of(day, *(on(name, each[day]) for name, each in factors.items())), "main.json", store)
    (pytester.path / "base.json").write_bytes(encode_report(run_of(40, *map(on, hosts))))
    config = pytester.parseconfigure("--energy-compare=base.json", "--energy-fail-on=energy_j:3%")
    gating = Gating(config, settings_of(config))
    found = [gating.compare(on(name), None, [], {name: host})[0] for name, host in hosts.items()]
    assert [each.session_spread for each in found] == [
        pytest.approx(0.006, rel=0.5),
        pytest.approx(0.03, rel=0.5),
    ]


def test_compare_uses_the_history_of_the_project_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, day, factor in (("base.json", 40, 1.0), ("head.json", 41, 1.04)):
        Path(name).write_bytes(encode_report(day_of(day, factor)))
    verdicts = {}
    for place in (None, "elsewhere", ".llenergy/history"):
        if place is not None:
            write_history(tmp_path / place, 0.003)
        options = ["--history", "elsewhere"] if place == "elsewhere" else []
        main(["compare", "base.json", "head.json", "--metric=energy_j", *options])
        out = capsys.readouterr().out
        (verdicts[place],) = [line.split()[0] for line in out.splitlines() if " test_decode[8] " in line]
        assert ("limits allow for 1.5% between sessions" in out) == (place is None)
    assert verdicts == {None: "inconclusive", "elsewhere": "regressed", ".llenergy/history": "regressed"}


@pytest.mark.parametrize("damage", [b"", b"{", b'{"n": 0}\n', b"\xff\n"])
def test_stored_comparison_does_not_fail_because_of_a_broken_history(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_history(tmp_path / ".llenergy/history", 0.006)
    file = next((tmp_path / ".llenergy/history").rglob("*.jsonl"))
    file.write_bytes(damage)
    for name in ("base.json", "head.json"):
        Path(name).write_bytes(encode_report(day_of(40 if name == "base.json" else 41)))
    assert main(["compare", "base.json", "head.json"]) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("llenergy compare: warning: .llenergy/history/")
    assert f"/{file.name}: " in line
    assert line.endswith("; limits allow for 1.5% between sessions")
    assert "limits allow for 1.5% between sessions" in out


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("n", "0", "broken session ("),
        ("noise", "1e308", "broken session ("),
        ("value", "1e400", "broken session ("),
        ("time", '"garbage"', "broken session ("),
        ("time", '"2026-01-02"', "broken session ("),
        ("schema_version", "99", "schema version 99 is newer than 1, "),
    ],
)
def test_impossible_entries_are_refused_with_one_line(
    field: str, value: str, reason: str, tmp_path: Path
) -> None:
    store = write_history(tmp_path, 0.006, 2)
    file = sorted(tmp_path.rglob("*.jsonl"))[-1]
    file.write_text(re.sub(rf'"{field}":[^,]+', f'"{field}":{value}', file.read_text(), count=1))
    with pytest.raises(ReportError) as caught:
        read_entries(store)
    assert f"/{file.name}: {reason}" in str(caught.value)


def test_newer_accepted_step_is_refused(tmp_path: Path) -> None:
    store = write_history(tmp_path, 0.006, 2)
    accept_step(store, commit(1), "x")
    (file,) = (tmp_path / "accepted").iterdir()
    file.write_text(file.read_text().replace('"schema_version":1', '"schema_version":99'))
    with pytest.raises(ReportError, match="schema version 99 is newer than 1"):
        load_accepted_steps(store)
