# SPDX-License-Identifier: Apache-2.0
"""Any command in ``ab``: numbers from its files, energy per number, and the verdicts on both."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import pytest

from pytest_llenergy.ab import session
from pytest_llenergy.ab.measured_command import MeasuredCommand, parse_measured
from pytest_llenergy.ab.session import Side
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.record import WindowRecord
from pytest_llenergy.record.report import Report, Source

from ..record.reports import REPORT
from .fake import SPREAD
from .project import Project

METER = {**msgspec.to_builtins(REPORT.records[0].meters[0]), "domain": "cpu:ten"}

DOCUMENT = {
    "total": {"output": 200, "p99": [1.5, 2.5]},
    "runs": [{"tokens": 7}, {"tokens": 8}],
    "name": "x",
    "yes": True,
    "nothing": None,
    "infinite": float("inf"),
}


def write_energy(path: Path, energy_j: float | None, duration_s: float = 2.0) -> None:
    """Write what ``llenergy run --format json`` prints."""
    window = WindowRecord(
        name="x",
        start_s=1.0,
        duration_s=duration_s,
        energy_j=energy_j,
        energy_u_j=None if energy_j is None else 0.01,
        energy_u_absolute_j=None if energy_j is None else 0.01,
        by_domain={},
        reason="the counter stood still" if energy_j is None else None,
    )
    found = {
        "command": ["x", "--key=secret"],
        "exit_status": 0,
        "started_at": "2026-11-29T15:00:00Z",
        "environment": REPORT.environment,
        "meters": [METER],
        "window": window,
    }
    path.write_bytes(msgspec.json.encode(found))


def read(tmp_path: Path, measured: MeasuredCommand, energy_j: float | None = 10.0) -> Report:
    """Read a session in which the command writes ``out.json``."""
    before = measured.look(tmp_path)
    (tmp_path / "out.json").write_text(json.dumps(DOCUMENT))
    write_energy(tmp_path / "energy.json", energy_j)
    return measured.read_report(tmp_path / "energy.json", tmp_path, before, Source())


@pytest.mark.parametrize(
    ("path", "value"),
    [("total.output", 200), ("total.p99.1", 2.5), ("runs.0.tokens", 7)],
)
def test_a_number_is_found_by_its_path(tmp_path: Path, path: str, value: float) -> None:
    (record,) = read(tmp_path, parse_measured("x", [f"n=out.json:{path}"], ["n"], [])).records
    assert record.metrics["n"].value == value
    assert record.metrics["J_per_n"].value == pytest.approx(10 / value)
    assert (record.id, record.metrics["energy_j"].value, record.metrics["duration_s"].value) == ("x", 10, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("total.outputs", "out.json has no total.outputs (not 'outputs'; there: output, p99)"),
        ("runs.2.tokens", "out.json has no runs.2.tokens (not '2')"),
        ("name", "name of out.json is no number: 'x'"),
        ("yes", "yes of out.json is no number: 'True'"),
        ("nothing", "nothing of out.json is no number: 'None'"),
        ("infinite", "infinite of out.json is no number: 'inf'"),
        ("total", "total of out.json is no number: "),
    ],
)
def test_a_path_without_a_number_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        read(tmp_path, parse_measured("x", [f"n=out.json:{path}"], [], []))
    assert str(raised.value).startswith(f"--value n: {message}")


def test_a_file_of_an_earlier_session_is_not_read(tmp_path: Path) -> None:
    measured = parse_measured("x", ["n=out.json:total.output"], [], [])
    write_energy(tmp_path / "energy.json", 10.0)
    output = tmp_path / "out.json"

    def session_that(writes: Callable[[], object]) -> None:
        before = measured.look(tmp_path)
        writes()
        measured.read_report(tmp_path / "energy.json", tmp_path, before, Source())

    with pytest.raises(PlanError, match=r"^--value: the command wrote no out\.json in /"):
        session_that(lambda: None)
    session_that(lambda: output.write_text(json.dumps(DOCUMENT)))
    stale = r"out\.json is of an earlier run: this one did not write it$"
    with pytest.raises(PlanError, match=stale):
        session_that(lambda: None)
    # The same content and time is another file all the same.
    found = output.stat()

    def again() -> None:
        output.write_text(json.dumps(DOCUMENT))
        os.utime(output, ns=(found.st_atime_ns, found.st_mtime_ns))

    session_that(again)
    with pytest.raises(PlanError, match=r"out\.json: not readable as JSON \("):
        session_that(lambda: output.write_text('{"total": '))


def test_energy_without_a_value_says_why(tmp_path: Path) -> None:
    (record,) = read(tmp_path, parse_measured("x", ["n=out.json:total.output"], ["n"], []), None).records
    assert (record.value_of("J_per_n"), record.value_of("n")) == (None, 200)
    assert record.metrics["J_per_n"].reason == "the counter stood still"


@pytest.mark.parametrize(
    ("values", "per", "better", "message"),
    [
        (["n"], [], [], "--value 'n' is not NAME=FILE:PATH"),
        (["n=out.json"], [], [], "--value 'n=out.json' is not NAME=FILE:PATH"),
        (["energy_j=a:b"], [], [], "--value energy_j: the name is built in"),
        (["n=a:b"], ["m"], [], "--per m needs --value m=FILE:PATH"),
        (["n=a:b"], [], ["m=higher"], "--better m needs --value m=FILE:PATH"),
        (["n=a:b"], [], ["n=more"], "--better 'n=more' is not NAME=higher or NAME=lower"),
    ],
)
def test_a_malformed_option_is_refused(
    values: list[str], per: list[str], better: list[str], message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        parse_measured("x", values, per, better)
    assert str(raised.value).startswith(message)


class Commands:
    """Stands in for processes: a command ``work TOKENS JOULES SPEED`` writes what it says."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []

    def __call__(
        self,
        side: Side,
        words: list[str],
        environment: dict[str, str],
        log: Path,
        poll: Callable[[TextIO], None],
    ) -> int:
        self.words.append(words)
        log.write_text("no luck\n")
        command = words[words.index("--") + 1 :]
        if command[0] == "sh":
            command = command[2].split()
        if command[0] == "false":
            return 7
        (name,) = [word.partition("=")[2] for word in words if word.startswith("--output=")]
        _, tokens, joules, speed = command
        factor = SPREAD[len(self.words) % len(SPREAD)]
        told = {"tokens": int(tokens), "speed": float(speed) * factor, "work_s": 0.5}
        (side.directory / "out.json").write_text(json.dumps(told))
        write_energy(Path(name), float(joules) * factor)
        return 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    fake = Commands()
    monkeypatch.setattr(session, "_run", fake)
    return fake


VALUES = [f"--value={name}=out.json:{name}" for name in ("tokens", "speed", "work_s")]
PAIRS = ["--pairs=6+6", *VALUES]


def verdicts(project: Project) -> dict[str, tuple[str, float]]:
    found = project.paired().compared.comparisons
    return {each.metric: (each.verdict, round(each.ratio or 0, 2)) for each in found}


def test_energy_per_value_and_values_are_judged_by_the_stages(project: Project, commands: Commands) -> None:
    """Twice the tokens for 2.2 times the energy: 10 % more per token."""
    asked = ["--per=tokens", "--better=speed=higher", "--fail-on=J_per_tokens:5%", "--metric=energy_j"]
    done = project.ab(*PAIRS, *asked, "--a=100 10 5", "--b=200 22 4", "--gpus=0", "--", "work")
    assert done.status == 1, done.err
    assert verdicts(project) == {
        "J_per_tokens": ("regressed", 1.1),
        "energy_j": ("regressed", 2.2),
        "speed": ("regressed", 0.8),
    }
    found = {each.metric: each for each in project.paired().compared.comparisons}
    assert (found["J_per_tokens"].n_base, found["J_per_tokens"].unit) == (12, "J/tokens")
    assert found["J_per_tokens"].kind == "measured"
    # The whole command did other work, which the energy per token allows for.
    assert "different workload: tokens: 100 -> 200" in found["energy_j"].notes
    assert not any("tokens" in note for note in found["J_per_tokens"].notes)
    notes = project.paired().compared.notes
    assert notes == [
        "start-up, all but work_s: 1.5 of 2 s (75%) of base, 1.5 of 2 s (75%) of head; "
        "10% more work is about 2.5% more seconds"
    ]
    assert "start-up, all but work_s" in done.out
    assert commands.words[0][-5:] == ["--", "work", "100", "10", "5"]
    assert "--gpus=0" in commands.words[0]
    # Neither command lines nor what they may name are kept.
    assert "secret" not in (project.path / ".llenergy" / "ab" / "ab.json").read_text()


def test_two_commits_run_in_their_checkouts(project: Project, commands: Commands) -> None:
    project.git("checkout", "-q", "-b", "feature")
    project.commit()
    done = project.ab("--base=main", "--pairs=4", *VALUES, "--", "work", "100", "10", "5")
    assert done.status == 0
    assert verdicts(project) == {"energy_j": ("unchanged", 1.0)}
    assert not (project.path / "out.json").exists()
    commits = [project.git("rev-parse", name) for name in ("main", "feature")]
    compared = project.paired().compared
    assert [compared.base.commit, compared.head.commit] == commits


def test_a_command_that_fails_stops_the_comparison(project: Project, commands: Commands) -> None:
    message = project.error("--a=x", "--b=y", "--", "false")
    assert message.startswith("session 1 (base a) ended with exit code 7: 'no luck'; the whole log: ")


def test_a_stopped_comparison_goes_on_unless_a_script_has_changed(
    project: Project, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git does not know the script."""
    script = project.path / "work.sh"
    script.write_text("echo 1\n")
    command = ["--pairs=4", "--a=work.sh 100 10 5", "--b=work.sh 100 10 5"]

    def stop(*args: Any) -> int:
        if len(commands.words) == 3:
            raise KeyboardInterrupt
        return commands(*args)

    for resumed in (True, False):
        monkeypatch.setattr(session, "_run", stop)
        project.ab(*command)
        monkeypatch.setattr(session, "_run", commands)
        commands.words.clear()
        if not resumed:
            script.write_text("echo 2\n")
        done = project.ab(*command)
        assert ("resuming a stopped comparison: 3 sessions" in done.err) is resumed
        notes = project.paired().compared.notes
        assert any("3 sessions were measured before a stop" in note for note in notes) is resumed
        assert len(commands.words) == (5 if resumed else 8)
        commands.words.clear()


def test_a_file_that_a_command_leaves_does_not_change_the_working_tree(
    project: Project, commands: Commands
) -> None:
    project.edit("work.py", "EACH = 10.0", "EACH = 9.0")
    done = project.ab("--base=HEAD", "--head=.", "--pairs=4", "--", "work", "1", "10", "5")
    assert done.status == 0, done.err
    assert (project.path / "out.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rounds-per-session=2", "--", "work"], "--rounds-per-session needs pytest; "),
        (["--per=n", "--", "pytest"], "--value, --per, --better, --meter, --gpus and --require are for "),
        (["--metric=J_per_m", "--a=1", "--b=2", "--", "work", "1", "1"], "unknown metric 'J_per_m'"),
        (["--a=work 1"], "no command; write it after --, "),
        (["--a= ", "--b=work 1"], "no command; write it after --, "),
    ],
)
def test_a_usage_error_is_one_line(
    project: Project, commands: Commands, args: list[str], message: str
) -> None:
    assert project.error(*args).startswith(message)


def test_aa_compares_a_command_with_itself(project: Project, commands: Commands) -> None:
    done = project.ab("--aa=2", "--pairs=4", *VALUES, "--per=tokens", "--", "work", "100", "10", "5")
    assert done.status == 0, done.err
    assert "false alarms: 0 of 2" in done.out
