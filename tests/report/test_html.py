# SPDX-License-Identifier: Apache-2.0
"""Pages of made reports: what their cells, charts and verdicts say, and that texts stay texts."""

from __future__ import annotations

import re
from functools import cache

import msgspec
import pytest

from pytest_llenergy.record.record import Flag, Record, Tokens
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.html.axes import Axis
from pytest_llenergy.report.html.page import render_compared, render_report

from ..compare.runs import record_of, report_of, round_of
from ..record.reports import REPORT
from .pages import HOSTILE, Reader, load_curve, names, odd, pair_of, run_of

ESTIMATE = msgspec.structs.replace(REPORT.records[0].meters[0], kind="estimated")


@cache
def run_shown() -> str:
    return render_report(run_of())


@cache
def pair_shown() -> str:
    pair = pair_of(names(6))
    return render_compared(pair.base, pair.head, pair.compared, pairs="6+6")


def test_a_row_has_the_numbers_of_its_test() -> None:
    """Six rounds of 10 J in 2 s, each two iterations with 8 of 16 output tokens."""
    reader = Reader(render_report(report_of(record_of("t.py::test_it", [10.0] * 6, params={}))))
    row = reader.row("test_it", "measured")
    assert [cell.partition(" ±")[0] for cell in row[2:]] == ["5.0000", "625.00", "8", "5.0000", "1", "6"]
    assert reader.row("energy_j")[1].startswith("5.0000 ± ")
    # Rounds have their energy, of two iterations.
    assert [row[1:3] for row in reader.rows if row[:1] == ["6"]] == [["2", "10.000 ± 0.001 J"]]


def test_the_top_counts_tests_and_names_machine_model_and_commit() -> None:
    text = run_shown()
    assert "<title>Energy report: 1 failed, 13 measured, 2 skipped</title>" in text
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert facts["Machine"] == "AMD EPYC 9354 (64 CPUs), 1 × NVIDIA H100"
    assert facts["Backend"] == "transformers 1.0, llamacpp 1.0, openvino 1.0"
    assert facts["Commit"] == "abc on main (with changes)"


def test_an_estimate_is_never_called_measured() -> None:
    records = (record_of(f"t.py::test_{name}", meters=[ESTIMATE]) for name in "ab")
    text = render_report(report_of(*records))
    assert "<title>Energy report: 2 estimated</title>" in text
    assert not re.search(r">[^<]*\bmeasured\b", text.partition("<body>")[2].replace("Sessions", ""))
    assert text.count("J/token (estimated)</text>") == 0
    assert len(re.findall(r"J/token \(estimated\)", text)) >= 2


def test_bars_are_as_long_as_their_energies() -> None:
    read = Tokens(input=300, output=4)
    rounds = {name: [round_of(joules, tokens=read)] * 6 for name, joules in (("a", 4.0), ("b", 1.0))}
    text = render_report(
        report_of(*(record_of(f"t.py::test_{name}", rounds=rounds[name]) for name in rounds))
    )
    long, short = map(float, re.findall(r'<rect class="bar" width="([\d.]+)%', text))
    assert long == pytest.approx(4 * short, rel=0.01)
    # A prefill has no energy per output token.
    assert "Energy against speed" not in text
    assert "<h3>Energy of an iteration</h3>" in text


def test_energy_against_speed_has_a_mark_with_a_name_for_each_test() -> None:
    marks = run_shown().partition("<h3>Energy against speed</h3>")[2].partition("</figure>")[0]
    places = re.findall(r'<svg x="([\d.]+)%" y="([\d.]+)">.*?<title>(.*?)</title>', marks)
    assert len(places) == 9
    (fastest,) = [each for each in places if "[llamacpp-32]" in each[2]]
    (thriftiest,) = [each for each in places if "[openvino-32]" in each[2]]
    assert float(fastest[0]) == max(float(x) for x, _, _ in places)
    assert float(thriftiest[1]) == max(float(y) for _, y, _ in places)
    assert re.search(r"\[openvino-32\]: 10\d\d token/s, 5\d\.\d ± \d\.\d mJ/token", thriftiest[2])
    assert '<tspan class="wide">llamacpp, batch_size=32</tspan>' in marks


def test_a_parameter_that_is_a_number_has_a_line_for_each_backend() -> None:
    chart = run_shown().partition("<h3>test_decode: energy per token by batch_size</h3>")[2]
    chart = chart.partition("</figure>")[0]
    assert re.findall(r"</svg>(\w+)</span>", chart) == ["llamacpp", "openvino", "transformers"]
    assert chart.count("<polyline") == 3
    places = [(float(x), tip) for x, tip in re.findall(r'<svg x="([\d.]+)%".*?<title>(.*?)</title>', chart)]
    assert len(places) == 9
    assert [tip.count("-1]") for _, tip in sorted(places)] == [1] * 3 + [0] * 6


def test_verdicts_are_those_of_the_comparison_worst_first() -> None:
    pair, reader = pair_of(names(6)), Reader(pair_shown())
    title = "2 regressed, 1 invalid, 1 inconclusive, 2 improved, 1 new, 1 removed, 1 unchanged"
    assert f"<title>Energy comparison: {title}</title>" in pair_shown()
    order = [row[0] for row in reader.rows if len(row) == 10 and row[0]]
    assert sorted(order, key=order.index) == order
    assert order[0] == "regressed"
    for each in pair.compared.comparisons:
        if each.ratio is not None and each.low is not None and each.high is not None:
            row = reader.row(each.verdict, f"{each.ratio - 1:+.1%}")
            assert f"{each.low - 1:+.1%} … {each.high - 1:+.1%}" in row
            assert f"test_decode[{each.id.partition('[')[2]}" in row


def test_intervals_are_drawn_where_the_changes_are() -> None:
    rows = [odd(id=f"t.py::t{n}", ratio=r, low=r - 0.1, high=r + 0.1) for n, r in enumerate((0.8, 1.0, 1.2))]
    text = render_report(report_of(*(record_of(each.id, comparisons=[each]) for each in rows)))
    chart = text.partition("<h3>Verdicts</h3>")[2].partition("</figure>")[0]
    ticks = {name: float(x) for x, name in re.findall(r'<text x="([\d.]+)%"[^>]*>(-?\d+)</text>', chart)}
    places = [float(x) for x in re.findall(r'<svg x="([\d.]+)%" y="26">', chart)]
    assert places == pytest.approx([ticks["-20"], ticks["0"], ticks["20"]], abs=0.1)
    ends = [tuple(map(float, each)) for each in re.findall(r'thick" x1="([\d.]+)%" x2="([\d.]+)%', chart)]
    assert ends[1] == pytest.approx(
        ((ticks["-20"] + ticks["0"]) / 2, (ticks["0"] + ticks["20"]) / 2), abs=0.1
    )


def test_a_doubled_energy_is_drawn_where_it_is_however_wide_its_limits_are() -> None:
    rows = [odd(id="t.py::a", ratio=2.5, low=1.1, high=1e9), odd(id="t.py::b", ratio=1.5, low=1.4, high=1.6)]
    text = render_report(report_of(*(record_of(each.id, comparisons=[each]) for each in rows)))
    chart = text.partition("<h3>Verdicts</h3>")[2].partition("</figure>")[0]
    ticks = {name: float(x) for x, name in re.findall(r'<text x="([\d.]+)%"[^>]*>(-?\d+)</text>', chart)}
    places = [float(x) for x in re.findall(r'<svg x="([\d.]+)%" y="26">', chart)]
    assert places == pytest.approx([ticks["150"], ticks["50"]], abs=0.1)


def test_every_round_of_both_sides_is_listed_with_its_flags() -> None:
    (first, *_) = pair_shown().split('<details class="test"')[1:]
    for side in ("base", "head"):
        rounds = Reader(
            first.partition(f"<summary>Rounds, {side} (8)</summary>")[2].partition("</details>")[0]
        )
        assert [row[0] for row in rounds.rows if row] == [str(number) for number in range(1, 9)]
        assert rounds.row("6")[-2:] == ["doubtful", "the counter ran backwards"]


def test_every_reason_is_shown_once_with_its_tests() -> None:
    text = run_shown().partition("<h2>Each test</h2>")[0]
    assert Reader(text).row("skipped", "no GPU")[-1] == "test_gpu.py::test_gpu[0] and 1 more"
    assert Reader(text).row("test_pipeline", "sampling")[-1] == "no joules: shorter than a tick"


def test_loads_have_a_table() -> None:
    text = render_report(report_of(msgspec.structs.replace(record_of(), load_curve=load_curve())))
    assert Reader(text).row("9.8", "maximum")[2] == "302 ± 20 mJ"


def test_many_tests_are_in_the_tables_only() -> None:
    report = report_of(*(record_of(f"t.py::test[{number}]") for number in range(103)))
    text = render_report(report)
    assert text.count('<details class="test"') == 100
    assert "3 more tests are in the tables only." in text
    assert "40 of 103 are drawn." in text
    reader = Reader(text)
    assert len([row for row in reader.rows if row and "measured" in row]) >= 103
    targets = {each[1:] for each in reader.of("a", "href")}
    assert targets == set(reader.of("details", "id"))


@pytest.mark.parametrize(
    "record",
    [
        Record(id="t.py::gone", attempt=1, status="crashed", reason="rank 0 was killed"),
        record_of(comparisons=[odd(ratio=1.1)]),
        record_of(comparisons=[odd(ratio=0.0, low=0.0, high=0.0)]),
        record_of(comparisons=[odd(ratio=1e300, low=-1.3, high=1e308, noise=2.0, detectable=50.0)]),
        record_of(comparisons=[odd(metric="of_a_later_version", ratio=1.0, low=1.0, high=1.0)]),
        record_of(rounds=[]),
        record_of(rounds=[round_of(None, temperature_start_c=50.0)] * 3),
        record_of(rounds=[round_of(-5.0), round_of(0.0)]),
        record_of(rounds=[round_of(1e-9, duration_s=1e-9), round_of(1e9, duration_s=0.0)]),
        record_of(rounds=[round_of(5.0, tokens=Tokens(input=1, output=0))] * 2),
    ],
)
def test_unusual_records_are_shown(record: Record) -> None:
    other = msgspec.structs.replace(record, id="t.py::other")
    assert "<h2>Each test</h2>" in render_report(report_of(record, other))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 10.0], ["0", "2", "4", "6", "8", "10"]),
        ([-3.0, 7.3], ["-2", "0", "2", "4", "6"]),
        ([1.0, 1000.0], ["1", "10", "100", "1000"]),
        ([5.0, 5.0], ["4.7", "4.8", "4.9", "5.0", "5.1", "5.2"]),
        ([], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([1e16, 1e16 + 2], None),
        ([1e-300, 2e-300, float("inf")], None),
        ([1e-320, 1e30], None),
    ],
)
def test_axes_have_round_values(values: list[float], ticks: list[str] | None) -> None:
    found = Axis(values, "s").ticks()
    assert all(0 <= share <= 1 for share, _ in found)
    assert ticks is None or [text for _, text in found] == ticks
    assert len(found) <= 8


def hostile_report(report: Report) -> Report:
    """A report in which every text is somebody's attack."""
    unseen = "\x00\x1b[31m\u202etxt.exe\u202c\u2028"
    records = [
        msgspec.structs.replace(
            record,
            id=f"t.py::test[{HOSTILE[number % len(HOSTILE)]}{number}]",
            params={text: f"{text}{unseen}" for text in HOSTILE},
            reason=f"{HOSTILE[1]}{unseen}",
            fallback=HOSTILE[2],
            flags=[Flag(name=HOSTILE[3], severity="warning", detail=HOSTILE[0] + unseen)],
            comparisons=[odd(id=record.id, metric=HOSTILE[1], unit=HOSTILE[2], ratio=1.1, notes=[*HOSTILE])],
        )
        for number, record in enumerate(report.records)
    ]
    source = msgspec.structs.replace(report.source, commit=HOSTILE[1], branch=HOSTILE[0])
    return msgspec.structs.replace(report, records=records, source=source)


@cache
def hostile_shown() -> str:
    return render_report(hostile_report(run_of()))


def test_no_text_becomes_markup() -> None:
    found, ours = Reader(hostile_shown()), Reader(run_shown() + pair_shown())
    assert set(found.tags) <= set(ours.tags)
    assert {name for _, name, _ in found.attributes} <= {name for _, name, _ in ours.attributes}
    assert all(each.startswith("#") for each in found.of("a", "href"))
    shown = "".join(found.texts)
    assert all(text in shown for text in HOSTILE)
    assert all(each.isprintable() or each == "\n" for each in hostile_shown())
    assert "\\x00\\x1b[31m\\u202etxt.exe" in hostile_shown()


def test_the_content_security_policy_allows_styles_only() -> None:
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', run_shown())
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("style-src") == "'unsafe-inline'"
    assert rules.pop("img-src") == "data:"
    assert set(rules.values()) == {"'none'"}
    assert "default-src" in rules


def test_command_lines_are_not_shown() -> None:
    run = msgspec.structs.replace(REPORT.run, argv=["--energy-compare=http://bob:hunter2@host/main.json"])
    assert "hunter2" not in render_report(msgspec.structs.replace(report_of(record_of()), run=run))
