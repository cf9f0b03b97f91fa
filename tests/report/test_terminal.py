# SPDX-License-Identifier: Apache-2.0
"""The summary in a terminal: fits, loses no digit, and is laid out as asked."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.metrics import METRICS as COMPARED
from pytest_llenergy.model.record import BackendInfo, Flag, Record, Terms
from pytest_llenergy.model.report import encode_report
from pytest_llenergy.report.columns import (
    COLUMNS,
    GROUP_KEYS,
    METRICS,
    Layout,
    parse_columns,
    parse_group_by,
    parse_sort,
)
from pytest_llenergy.report.markdown import render_run_markdown
from pytest_llenergy.report.terminal import render_summary

from ..compare.runs import record_of, report_of, round_of, scaled

TERMS = Terms(edges_j=0.0031, outside_j=0.0012, resolution_j=0.0005, coverage_j=0.0)
LATE = Flag(name="late-reader", severity="warning", detail="a tick was seen 12 ms late")


def made(name: str, factor: float, backend: str, size: int) -> Record:
    return record_of(
        f"a/test_x.py::{name}[{backend}-{size}]",
        scaled(factor),
        params={"backend": backend, "batch_size": size},
        backend=BackendInfo(name=backend, version="1", model="m"),
        ranks=[],
    )


RECORDS = [
    made("test_b", 3.0, "openvino", 2),
    made("test_a", 1.0, "transformers", 10),
    made("test_a", 2.0, "openvino", 1),
]


def shown(*records: Record, width: int = 80, verbosity: int = 0, **layout: object) -> list[str]:
    made = Layout(**layout)  # type: ignore[arg-type]
    return render_summary(
        records or RECORDS, width, color=False, layout=made, verbosity=verbosity
    ).splitlines()


def order_of(lines: list[str]) -> list[str]:
    """``a 1`` for each row of ``test_a batch_size=1``, however it is folded."""
    text = " ".join(lines)
    return [f"{name} {size}" for name, size in re.findall(r"test_(\w).*?batch_size=(\d+)", text)]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("verbosity", [0, 1, 2])
@pytest.mark.parametrize("columns", [("energy_j",), tuple(COLUMNS)], ids=["one", "all"])
def test_the_table_fits_with_any_columns(width: int, verbosity: int, columns: tuple[str, ...]) -> None:
    long = record_of(
        "a/test_x.py::test_" + "long_" * 60,
        scaled(123456.0),
        rounds=[round_of(each, flags=[LATE] * 3, terms=TERMS) for each in scaled(123456.0)],
        flags=[LATE],
    )
    lines = shown(long, *RECORDS, width=width, verbosity=verbosity, columns=columns)
    assert max(map(len, lines)) <= width


def test_columns_that_do_not_fit_continue_in_another_table() -> None:
    lines = shown(RECORDS[0], columns=tuple(COLUMNS))
    heads = [line for line in lines if line.startswith("test ")]
    assert len(heads) > 1
    told = " ".join(heads)
    assert all(column.head in told for column in COLUMNS.values())
    # Every figure, with all of its digits.
    for name in ("energy_j", "mean_power_w", "duration_s"):
        assert COLUMNS[name].cell(RECORDS[0]) in " ".join(lines)
    assert len([line for line in shown(RECORDS[0]) if line.startswith("test ")]) == 1


def test_columns_are_those_asked_for_in_that_order() -> None:
    lines = shown(columns=("duration_s", "rounds", "energy_j"))
    assert lines[0].split() == ["test", "s", "rounds", "J", "±", "u"]
    assert lines[2].split()[-5:-3] == ["1", "6"]


def test_columns_that_are_empty_are_shown_only_if_asked_for() -> None:
    metrics = {"energy_j": RECORDS[0].metrics["energy_j"]}
    plain = record_of("t.py::test_plain", metrics=metrics, params={}, backend=None, ranks=[])
    assert shown(plain)[0].split() == ["test", "J", "±", "u", "meter"]
    assert "backend" in shown(plain, columns=("backend", "energy_j"))[0]
    # One that has something in it keeps the column for all, in every group.
    lines = shown(plain, RECORDS[0], group_by=("func",))
    assert [line.split()[1] for line in lines if line.startswith("test ")] == ["backend"] * 2
    text = render_run_markdown([plain], Layout(), 10_000, complete=True)
    assert "| test | J ± u | meter |" in text.replace("&#177;", "±")


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("", ["b 2", "a 10", "a 1"]),
        ("name", ["a 1", "a 10", "b 2"]),
        ("fullname", ["a 1", "a 10", "b 2"]),
        ("-name", ["b 2", "a 10", "a 1"]),
        ("energy_j", ["a 10", "a 1", "b 2"]),
        ("-energy_j", ["b 2", "a 1", "a 10"]),
    ],
)
def test_tests_are_sorted(sort: str, order: list[str]) -> None:
    assert order_of(shown(sort=sort)) == order


@pytest.mark.parametrize("sort", ["energy_per_output_token_j", "-energy_per_output_token_j"])
def test_records_without_a_value_come_last(sort: str) -> None:
    without = msgspec.structs.replace(RECORDS[0], rounds=[])
    without = msgspec.structs.replace(
        without, metrics={"energy_j": RECORDS[0].metrics["energy_j"]}, id="t.py::test_c[3]"
    )
    assert order_of(shown(without, *RECORDS[1:], sort=sort))[-1] == "c 2"


@pytest.mark.parametrize(
    ("group_by", "titles"),
    [
        (("backend",), ["backend=openvino", "backend=transformers"]),
        (("param:batch_size",), ["batch_size=2", "batch_size=10", "batch_size=1"]),
        (("param:other",), ["other=-"]),
        (("func",), ["func=test_b", "func=test_a"]),
        (("fullfunc",), ["fullfunc=a/test_x.py::test_b", "fullfunc=a/test_x.py::test_a"]),
        (("param",), ["param=openvino-2", "param=transformers-10", "param=openvino-1"]),
        (("model", "func"), ["model=m, func=test_b", "model=m, func=test_a"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else "",
)
def test_tests_are_grouped_in_the_order_of_the_run(group_by: tuple[str, ...], titles: list[str]) -> None:
    lines = shown(group_by=group_by)
    names = "|".join(word.removeprefix("param:") for word in group_by)
    assert [line for line in lines if re.match(f"({names})=", line)] == titles
    assert len(order_of(lines)) == 3


def test_groups_keep_their_order_when_their_tests_are_sorted() -> None:
    lines = shown(group_by=("backend",), sort="energy_j")
    assert order_of(lines) == ["a 1", "b 2", "a 10"]
    assert lines[0] == "backend=openvino"


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_columns, "energy_j,joules,watts", "unknown: joules, watts; known: backend, model, device, "),
        (parse_columns, " , ", "no name given"),
        (parse_sort, "speed", "unknown: speed; known: name, fullname, energy_j, "),
        (parse_sort, "--energy_j", "unknown: -energy_j; known: "),
        (parse_group_by, "mark", f"unknown: mark; known: {', '.join(GROUP_KEYS)}, param:NAME"),
        (parse_group_by, "backend,param:", "unknown: param:; known: "),
    ],
)
def test_an_unknown_name_is_reported_with_the_known_ones(read: object, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(text)  # type: ignore[operator]
    assert "\n" not in str(error.value)


def test_a_repeated_column_is_shown_once() -> None:
    assert parse_columns("rounds,backend,rounds") == ("rounds", "backend")
    assert parse_group_by("param:a,func,param:a") == ("param:a", "func")


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_line_ends_with_blanks(width: int) -> None:
    lines = shown(width=width, verbosity=2, columns=tuple(COLUMNS))
    assert [line for line in lines if line != line.rstrip()] == []


def test_every_metric_can_be_shown() -> None:
    assert set(METRICS) == set(COMPARED)
    assert parse_columns(",".join(COLUMNS)) == tuple(COLUMNS)


def test_v_shows_rounds_and_vv_uncertainty() -> None:
    rounds = [round_of(each, terms=TERMS, temperature_start_c=41.0) for each in (10.0, 10.02)]
    rounds[1] = msgspec.structs.replace(rounds[1], flags=[LATE])
    note = Flag(name="estimated", severity="note", detail="a model")
    record = record_of("t.py::test_it", rounds=rounds, flags=[note], params={})
    once, twice = shown(record, verbosity=1), shown(record, verbosity=2)
    start = next(number for number, line in enumerate(once) if " rounds of 2 iterations" in line)
    assert once[start].endswith("2 rounds of 2 iterations after a warm-up of 3 (settled)")
    assert once[start + 1].split() == ["round", "s", "J", "±", "u", "token", "°C", "flags"]
    assert once[start + 3].split() == ["1", "2", "10.0", "±", "1.0", "16", "41", "-"]
    assert once[start + 4].split() == ["2", "2", "10.0", "±", "1.0", "16", "41", "late-reader"]
    assert not [line for line in once if "edges" in line or "12 ms late" in line]
    assert not [line for line in shown(record) if "rounds of" in line]
    text = "\n".join(twice)
    assert re.search(r"edges J +outside J +resolution J +coverage J", text)
    assert re.search(r"^1 +0.0031 +0.0012 +0.0005 +0$", text, re.MULTILINE)
    assert "u of an iteration: " in text
    assert "estimated (note): a model" in twice
    assert "round 2: late-reader (warning): a tick was seen 12 ms late" in twice


def test_colours_are_for_terminals() -> None:
    crashed = record_of("t.py::test_gone", status="crashed", reason="gone", rounds=[], metrics={})
    flagged = msgspec.structs.replace(RECORDS[0], flags=[LATE])
    text = render_summary([crashed, flagged], 80, color=True)
    assert "\x1b[31mCRASHED" in text
    assert "\x1b[33mlate-reader" in text
    assert "\x1b" not in render_summary([crashed, flagged], 80, color=False)


def test_nothing_in_a_test_id_is_markup() -> None:
    odd = record_of("t.py::test_it[:warning:[bold]\x1b[31m]", status="invalid", reason=":smile: [red]x")
    text = render_summary([odd], 200, color=False)
    assert ":warning:[bold]\\x1b[31m" in text
    assert ":smile: [red]x" in text


def test_the_command_accepts_the_layout_options_of_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "energy.json"
    path.write_bytes(encode_report(report_of(*RECORDS)))
    words = ["--columns=duration_s", "--sort=energy_j", "--group-by=backend"]
    assert main(["report", str(path), *words]) == 0
    told = capsys.readouterr().out.splitlines()
    layout = Layout(("duration_s",), "energy_j", ("backend",))
    assert told == render_summary(RECORDS, 80, color=False, layout=layout).splitlines()
    assert main(["report", str(path), "-v"]) == 0
    assert "6 rounds of 2 iterations" in capsys.readouterr().out
    assert main(["report", str(path), "--sort=speed"]) == 2
    assert capsys.readouterr().err.startswith("llenergy: --sort=speed: unknown: speed; known: name, ")


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False)]
)
def test_the_command_prints_colours_on_a_terminal_only(
    environment: dict[str, str],
    coloured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "energy.json"
    path.write_bytes(encode_report(report_of(*RECORDS)))
    assert main(["report", str(path)]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == coloured


SUITE = """
import time, pytest
@pytest.mark.parametrize("size", [1, 2])
def test_it(energy, size):
    energy(time.sleep, 0.05 * size)
"""


def test_options_lay_out_the_summary_of_a_run(quick: pytest.Pytester) -> None:
    quick.makepyfile(SUITE)
    result = quick.runpytest(
        "--energy-columns=duration_s,meter", "--energy-sort=-energy_j", "--energy-group-by=param:size"
    )
    result.stdout.fnmatch_lines(
        [
            "*= energy =*",
            "size=1",
            "test * s *meter*",
            "test_it size=1 *0.* ten-watts",
            "size=2",
            "test_it size=2 *0.* ten-watts",
        ]
    )


def test_ini_keys_lay_out_the_summary(quick: pytest.Pytester) -> None:
    quick.makepyfile(SUITE)
    with (quick.path / "tox.ini").open("a") as ini:
        ini.write("\nenergy_columns = rounds\nenergy_sort = -energy_j\n")
    lines = quick.runpytest().stdout.lines
    rows = [line.split() for line in lines if line.startswith("test_it ")]
    assert rows == [["test_it", "size=2", "2"], ["test_it", "size=1", "2"]]


@pytest.mark.parametrize(
    ("verbosity", "rounds", "terms"), [([], False, False), (["-v"], True, False), (["-vv"], True, True)]
)
def test_verbosity_of_a_run(quick: pytest.Pytester, verbosity: list[str], rounds: bool, terms: bool) -> None:
    quick.makepyfile(SUITE)
    text = quick.runpytest(*verbosity).stdout.str()
    assert ("test_it size=1: 2 rounds of 1 iteration after a warm-up of 0" in text) == rounds
    assert ("resolution J" in text) == terms
