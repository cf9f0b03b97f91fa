# SPDX-License-Identifier: Apache-2.0
"""The summary in a terminal: fits, loses no digit, and is laid out as asked."""

from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.base import Status
from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.metrics import BUILT_IN, METRIC_NAMES
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import (
    BackendInfo,
    Flag,
    Metric,
    Record,
    Times,
    Tokens,
    WindowRecord,
)
from pytest_llenergy.record.report import encode_report
from pytest_llenergy.report.columns import COLUMNS
from pytest_llenergy.report.layout import Layout, parse_columns
from pytest_llenergy.report.markdown import render_run_markdown
from pytest_llenergy.report.terminal import render_summary

from ..compare.runs import record_of, report_of, round_of, scaled
from ..record.reports import RECORD

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


def shown(*records: Record, width: int = 80, verbose: bool = False, **layout: object) -> list[str]:
    made = Layout(**layout)  # type: ignore[arg-type]
    return render_summary(records or RECORDS, width, color=False, layout=made, verbose=verbose).splitlines()


#: Thirty tests as in a real suite: they write tokens, only read them, or count none.
MANY = [
    record_of(
        f"benchmarks/test_inference.py::{function}[{backend}-{number}]",
        rounds=[round_of(each, u_j=0.1, tokens=tokens) for each in scaled(0.1 * number)],
        params={"backend": backend, **params, "batch_size": number},
        backend=BackendInfo(name=backend, version="1", model="m"),
        ranks=[],
    )
    for function, tokens, params in (
        ("test_decode_of_a_long_prompt_with_a_shared_prefix" + "_and_more" * 5, Tokens(30, 16), {}),
        ("test_prefill", Tokens(300, 4), {"attention_implementation": "flash-attention-2-with-sinks"}),
        ("test_tokenize_and_detokenize", None, {"vocabulary": "multilingual"}),
    )
    for backend in ("transformers", "llama-server")
    for number in (1, 2, 4, 8, 16)
]


def test_thirty_tests_with_long_names_are_one_table_of_eighty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "energy.json"
    path.write_bytes(encode_report(report_of(*MANY)))
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["test", "energy", "±", "u", "per", "token", "±", "u", "token/s"]
    assert text.count("energy ± u") == text.count("per token ± u") == text.count("token/s") == 1
    rows = [line for line in lines if " ± " in line][1:]
    assert len(rows) == len(MANY)
    names = "".join(line.strip() for line in lines)
    assert all(record.id.partition("::")[2].partition("[")[0] in names for record in MANY)
    # Work that only reads has joules per input token and seconds, the rest no joules per token.
    assert len([row for row in rows if re.search(r"J  +[\d.]+ ± [\d.]+ [mµ]J/in +1 s$", row)]) == 10
    assert len([row for row in rows if re.search(r"J  +- +1 s$", row)]) == 10
    # What rows share is said once.
    assert text.count("within 5%") == 1


def test_rows_compare_unless_their_devices_differ() -> None:
    board = Board(uuid="GPU-a", name="H200", pci_bus_id="0")
    one, two = (record_of(f"t.py::test_{each}", params={}, ranks=[], boards=[board]) for each in "ab")
    other = msgspec.structs.replace(two, boards=[msgspec.structs.replace(board, name="L4")])
    u, whole_u = (
        format_quantity(metric.value, each, "J")
        for metric in [one.metrics["energy_j"]]
        if metric.value is not None
        for each in (metric.uncertainty, metric.uncertainty_absolute)
    )
    assert u != whole_u

    def rendered(*records: Record) -> list[str]:
        markdown = html.unescape(render_run_markdown(records, Layout(), 10_000, complete=True))
        return ["\n".join(shown(*records)), markdown]

    for alike, unlike in zip(rendered(one, two), rendered(one, other), strict=True):
        assert alike.count(u) == 2
        assert "all rows share one error of scale (within 5%)" in " ".join(alike.split())
        assert unlike.count(whole_u) == 2
        assert "u includes the accuracy of the meters" in unlike
        assert "all rows share" not in unlike


def test_columns_without_room_are_left_out_and_named() -> None:
    meters = [msgspec.structs.replace(each, name="a-meter-with-a-long-name") for each in RECORDS[0].meters]
    boards = [Board(uuid="GPU-a", name="A Board With A Long Name", pci_bus_id="0")]
    lines = shown(msgspec.structs.replace(RECORDS[0], meters=meters, boards=boards), *RECORDS[1:])
    assert [line for line in lines if line.startswith("no room")] == ["no room for meter, device (-v)"]
    assert len([line for line in lines if line.startswith("test ")]) == 1
    assert "device" in shown(*RECORDS[1:], RECORDS[0], width=80, verbose=True, columns=("device",))[0]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("columns", [("energy_j",), tuple(COLUMNS)], ids=["one", "all"])
def test_the_table_fits_with_any_columns(width: int, verbose: bool, columns: tuple[str, ...]) -> None:
    long = record_of(
        "a/test_x.py::test_" + "long_" * 60,
        scaled(123456.0),
        rounds=[round_of(each, flags=[LATE] * 3) for each in scaled(123456.0)],
        flags=[LATE],
    )
    lines = shown(long, *RECORDS, width=width, verbose=verbose, columns=columns)
    assert max(map(len, lines)) <= width


def test_columns_that_do_not_fit_continue_in_another_table() -> None:
    lines = shown(RECORDS[0], columns=tuple(COLUMNS))
    heads = [line for line in lines if line.startswith("test ")]
    assert len(heads) > 1
    reported = " ".join(heads)
    assert all(column.head in reported for column in COLUMNS.values())
    # Every figure, with all of its digits.
    for name in ("energy_j", "mean_power_w", "duration_s"):
        assert COLUMNS[name].cell(RECORDS[0]) in " ".join(lines)
    assert len([line for line in shown(RECORDS[0]) if line.startswith("test ")]) == 1


def test_empty_columns_are_shown_only_if_requested() -> None:
    metrics = {"energy_j": RECORDS[0].metrics["energy_j"]}
    plain = record_of("t.py::test_plain", metrics=metrics, params={}, backend=None, ranks=[])
    assert shown(plain)[0].split() == ["test", "energy", "±", "u"]
    assert "backend" in shown(plain, columns=("backend", "energy_j"))[0]
    text = render_run_markdown([plain], Layout(), 10_000, complete=True)
    assert "| test | energy ± u |\n" in text.replace("&#177;", "±")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("energy_j,a b,energyj", "unknown: a b, energyj; known: backend, model, device, "),
        (" , ", "no name given"),
    ],
)
def test_an_unknown_name_is_reported_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_columns(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_cells_have_an_uncertainty_if_their_heading_says_so_and_joules_their_unit(name: str) -> None:
    unit = BUILT_IN[name].unit
    metric = Metric(value=146.2, unit=unit, uncertainty=12.0, uncertainty_absolute=12.3, n=6)
    column = COLUMNS[name]
    cell = column.cell(record_of(metrics={name: metric}))
    assert ("±" in cell) == column.head.endswith("± u")
    if unit.partition("/")[0] == "J":
        assert cell == "146 ± 12 J"


def test_v_shows_rounds() -> None:
    rounds = [round_of(each, temperature_start_c=41.0) for each in (10.0, 10.02)]
    rounds[1] = msgspec.structs.replace(rounds[1], flags=[LATE])
    note = Flag(name="estimated", severity="note", detail="a model")
    record = record_of("t.py::test_it", rounds=rounds, flags=[note], params={})
    once = shown(record, verbose=True)
    start = next(number for number, line in enumerate(once) if " rounds of 2 iterations" in line)
    assert once[start].endswith("2 rounds of 2 iterations after a warm-up of 3 (settled)")
    assert once[start + 1].split() == ["round", "s", "energy", "±", "u", "token", "°C", "flags"]
    assert once[start + 3].split() == ["1", "2", "10.000", "±", "0.001", "J", "16", "41", "-"]
    assert once[start + 4].split() == ["2", "2", "10.020", "±", "0.001", "J", "16", "41", "late-reader"]
    assert not [line for line in shown(record) if "rounds of" in line]


def test_windows_beyond_ten_are_counted_and_shown_with_v() -> None:
    window = msgspec.structs.replace(RECORD.windows[0], name="step", energy_j=30.0, energy_u_absolute_j=0.5)
    lost = msgspec.structs.replace(window, energy_j=None, energy_u_absolute_j=None, reason="lost")
    many = record_of("t.py::test_many", rounds=[], windows=[window] * 12)
    broken = record_of("t.py::test_broken", rounds=[], windows=[window] * 10 + [lost, window])
    few = record_of("t.py::test_few", rounds=[], windows=[window] * 10)
    lines = shown(many, broken, few, width=100)
    assert [line for line in lines if " more " in line] == [
        "t.py::test_many: 2 more windows (-v)",
        "t.py::test_broken: 2 more windows, 1 without joules (-v)",
    ]
    assert len([line for line in lines if " · step" in line]) == 30
    lines = [line for line in shown(many, broken, few, width=100, verbose=True) if " · step" in line]
    assert len(lines) == 34


def test_a_row_says_that_its_test_failed() -> None:
    failed = record_of("t.py::test_bad", status="failed", reason="assert False", params={})
    passed = record_of("t.py::test_good", params={})
    lines = shown(failed, passed)
    assert any(line.startswith("test_bad (failed) ") for line in lines)
    assert not any("test_good (failed)" in line for line in lines)


def test_a_window_says_that_its_test_has_no_result() -> None:
    window = msgspec.structs.replace(RECORD.windows[0], name="a", energy_j=30.0, energy_u_absolute_j=0.5)
    statuses: tuple[Status, ...] = ("measured", "invalid", "failed")
    records = [
        record_of(f"t.py::test_{each}", status=each, reason="why", rounds=[], windows=[window])
        for each in statuses
    ]
    for lines in (
        shown(*records, width=100),
        html.unescape(render_run_markdown(records, Layout(), 10**5, complete=True)).splitlines(),
    ):
        assert [re.findall(r"test_(.*) · a", line)[0] for line in lines if " · a" in line] == [
            "measured",
            "invalid (invalid)",
            "failed (failed)",
        ]


def test_colours_are_for_terminals() -> None:
    crashed = record_of("t.py::test_gone", status="crashed", reason="gone", rounds=[], metrics={})
    flagged = msgspec.structs.replace(RECORDS[0], flags=[LATE])
    text = render_summary([crashed, flagged], 80, color=True)
    assert "\x1b[31mCRASHED" in text
    assert "\x1b[33mlate-reader" in text
    assert "\x1b" not in render_summary([crashed, flagged], 80, color=False)


def test_a_test_id_is_never_taken_for_markup() -> None:
    odd = record_of("t.py::test_it[:warning:[bold]\x1b[31m]", status="invalid", reason=":smile: [red]x")
    text = render_summary([odd], 200, color=False)
    assert ":warning:[bold]\\x1b[31m" in text
    assert ":smile: [red]x" in text


def test_the_command_has_the_columns_of_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "energy.json"
    path.write_bytes(encode_report(report_of(*RECORDS)))
    assert main(["report", str(path), "--columns=duration_s"]) == 0
    reported = capsys.readouterr().out.splitlines()
    layout = Layout(("duration_s",))
    assert reported == render_summary(RECORDS, 80, color=False, layout=layout).splitlines()
    assert main(["report", str(path), "-v"]) == 0
    assert "6 rounds of 2 iterations" in capsys.readouterr().out


class TestTimes:
    def timed(self, name: str, load_s: float) -> Record:
        times = Times(load_s=load_s, warmup_s=0.25, rounds_s=2.0, gaps_s=0.125)
        return msgspec.structs.replace(made(name, 1.0, "openvino", 1), times=times)

    def test_verbose_output_says_where_the_time_went(self) -> None:
        lines = shown(self.timed("test_a", 10.0), self.timed("test_b", 0.5), verbose=True)
        start = next(index for index, line in enumerate(lines) if line.startswith("time "))
        assert lines[start].split() == ["time", "load", "s", "warm-up", "s", "rounds", "s", "gaps", "s"]
        rows = [line.split() for line in lines[start + 2 : start + 5]]
        assert rows[0] == ["test_a", "openvino,", "batch_size=1", "10.00", "0.25", "2.00", "0.12"]
        assert rows[2] == ["all", "2", "10.50", "0.50", "4.00", "0.25"]


def test_the_device_is_shown_unless_it_is_the_only_one() -> None:
    def on(name: str, *boards: str, fallback: str | None = None) -> Record:
        made = [Board(uuid=f"GPU-{index}", name=each, pci_bus_id="0") for index, each in enumerate(boards)]
        devices = [each.uuid for each in made] or ["cpu"]
        return record_of(name, scaled(1.0), ranks=[], boards=made, devices=devices, fallback=fallback)

    cpu, one, two = on("t.py::test_a"), on("t.py::test_b", "H200"), on("t.py::test_c", "H200", "H200")
    for records in ([cpu, cpu], [one, one]):
        assert "device" not in shown(*records)[0]
    text = "\n".join(shown(cpu, one, two, width=120))
    assert "device" in text
    assert "cpu" in text
    assert "H200 x 2" in text
    assert "cpu (fallback)" in "\n".join(shown(on("t.py::test_a", fallback="cpu"), one, width=120))


def test_the_reason_of_a_window_without_joules_is_shown_once() -> None:
    reason = "not resolvable: 0.01 ms window"
    missing = Flag(name="unmeasured", severity="warning", detail=reason)
    window = WindowRecord(
        name="tiny",
        start_s=0.0,
        duration_s=1e-5,
        energy_j=None,
        energy_u_j=None,
        energy_u_absolute_j=None,
        by_domain={},
        flags=[missing],
        reason=reason,
    )
    record = record_of("t.py::test_it", status="invalid", reason=reason, windows=[window])
    for verbose in (False, True):
        lines = [line for line in shown(record, width=120, verbose=verbose) if reason in line]
        assert lines == [f"INVALID t.py::test_it · tiny: no joules: {reason}"]
