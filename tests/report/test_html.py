# SPDX-License-Identifier: Apache-2.0
"""The page: what is in it, that it is the same every time, and that nothing in a report becomes markup."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.comparison import Asked, compare_reports
from pytest_llenergy.measure.power_trace import MOST_STEPS
from pytest_llenergy.model.comparison import Baseline, Comparison
from pytest_llenergy.model.record import DomainPower, Flag, PowerTrace, Record, Round, Tokens, Window
from pytest_llenergy.model.report import Report, encode
from pytest_llenergy.report.html import page as pages
from pytest_llenergy.report.html.page import render_compared, render_report
from pytest_llenergy.report.html.power import total
from pytest_llenergy.report.html.trend import Trend, TrendPoint
from pytest_llenergy.report.verdicts import change, value

from ..compare.runs import LEVEL, TEST, record_of, report_of, round_of, scaled
from ..model.reports import REPORT
from .pages import Pair, names, pair_of

Command = pytest.CaptureFixture[str]


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, content or "") for name, content in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.rows and self.rows[-1] and "td" in self._open:
            self.rows[-1][-1] += data

    def cells(self) -> set[str]:
        """Everything that stands in a table."""
        return {cell.strip() for row in self.rows for cell in row}


@cache
def pair_shown() -> tuple[Pair, str]:
    """Four tests, with as many steps of power as a record may have, and their page."""
    pair = pair_of(names(4), steps=MOST_STEPS)
    days = [(f"2026-01-0{day}T00:00:00Z", f"c0ffee{day}", 1.0 + day / 10) for day in range(1, 7)]
    points = [TrendPoint(*day, changed=place == 3) for place, day in enumerate(days)]
    trend = Trend(names(1)[0], "energy_j", "J", points)
    return pair, render_compared(pair.base, pair.head, pair.compared, [trend], pairs="6+6")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_shown()[0]


@pytest.fixture(scope="module")
def compared_page() -> str:
    return pair_shown()[1]


@pytest.fixture(scope="module")
def report_page(pair: Pair) -> str:
    return render_report(pair.head)


def test_the_verdicts_come_worst_first(compared_page: str) -> None:
    chips = re.findall(r'<summary><span class="chip [a-z-]+">([a-z ]+)<', compared_page)
    assert chips == ["regressed", "invalid", "inconclusive", "improved", "new", "removed", "unchanged"]
    (title,) = re.findall("<title>(.*?)</title>", compared_page.partition("<style>")[0])
    assert title == (
        "Energy: 1 regressed, 1 invalid, 1 inconclusive, 1 improved, 1 new, 1 removed, 1 unchanged"
    )


def test_every_number_of_a_comparison_is_in_a_table(pair: Pair, compared_page: str) -> None:
    cells = Reader(compared_page).cells()
    for each in pair.compared.comparisons:
        expected = [value(each.base, each.unit), value(each.head, each.unit)]
        if each.judged:
            assert each.ratio is not None
            assert each.low is not None
            assert each.high is not None
            assert each.noise is not None
            assert each.detectable is not None
            expected += [f"{each.ratio - 1:+.1%}", f"{each.low - 1:+.1%} … {each.high - 1:+.1%}"]
            expected += [f"{each.noise:.1%}", f"{each.detectable:.1%}"]
        for text in expected:
            assert text == "-" or text in cells


def test_every_round_and_every_step_of_power_is_in_a_table(pair: Pair, compared_page: str) -> None:
    rows = Reader(compared_page).rows
    found = {tuple(cell.strip() for cell in row) for row in rows}
    flat = {cell for row in found for cell in row}
    for report in (pair.base, pair.head):
        for record in report.records:
            for round_ in record.rounds:
                if round_.energy_j is not None:
                    assert value(round_.energy_j / round_.iterations) in flat
                    assert value(round_.energy_j / round_.duration_s) in flat
            trace = record.power_trace
            if trace is None or "cpu:package-0" not in trace.by_domain:
                continue
            course = trace.by_domain["cpu:package-0"]
            for at_s, watts in zip(course.edges_s, course.power_w, strict=False):
                assert (f"{at_s:.6g}", value(watts)) in found


def test_rounds_measured_in_turn_are_shown_in_turn(pair: Pair, compared_page: str) -> None:
    def sides(page: str) -> list[str]:
        table = page.partition("<caption>Rounds</caption>")[2].partition("</table>")[0]
        return re.findall('<td class="t">((?:base|head) [0-9])', table)

    base, head = (msgspec.structs.replace(each, records=each.records[:1]) for each in (pair.base, pair.head))
    stored = sides(render_compared(base, head, pair.compared))
    assert stored == [f"{side} {n}" for side in ("base", "head") for n in range(1, 9)]
    assert sides(compared_page) == [f"{side} {n}" for n in range(1, 9) for side in ("base", "head")]


def test_invalid_rounds_are_listed_with_their_reason(report_page: str) -> None:
    table = report_page.partition("<caption>Invalid rounds</caption>")[2].partition("</table>")[0]
    rows = Reader(table).rows
    assert [
        "test_decode.py::test_decode[smollm2-135m-bs1-bfloat16]",
        "6",
        "impossible: the counter ran backwards",
    ] in [[cell.strip() for cell in row] for row in rows]
    assert any("the counter stood still" in row[-1] for row in rows if row)


def test_machine_meters_and_rule_are_told(compared_page: str) -> None:
    cells = Reader(compared_page).cells()
    assert {"AMD EPYC 9354, 64 usable", "NVIDIA H100, GPU-a, 80.0 GiB, 700 W", "gpu:GPU-a", "580.1"} <= cells
    assert {"3% or more", "more than 1%", "less than 5%"} <= cells


def test_a_report_shows_each_test_once_by_its_last_attempt() -> None:
    first = record_of("t.py::test_it", [1.0] * 6)
    again = msgspec.structs.replace(first, attempt=2, status="failed", reason="it broke")
    text = render_report(report_of(first, again))
    assert text.count('<details class="test"') == 1
    assert "it broke" in text


def test_a_report_with_a_baseline_shows_its_verdicts(pair: Pair) -> None:
    verdicts = {each.id: each for each in pair.compared.comparisons}
    records = [
        msgspec.structs.replace(record, comparisons=[verdicts[record.id]]) for record in pair.head.records[:2]
    ]
    baseline = Baseline(side=pair.compared.base, absent=["t.py::test_gone"])
    text = render_report(msgspec.structs.replace(pair.head, records=records, baseline=baseline))
    assert "<h3>Verdicts</h3>" in text
    assert "In the baseline and not in this run: t.py::test_gone" in text
    assert text.index("regressed</span> <span") < text.index("improved</span> <span")


def test_what_was_not_measured_has_its_reason_and_a_stopped_run_is_told() -> None:
    gone = Record(id="t.py::gone", attempt=1, status="crashed", reason="rank 0 was killed")
    text = render_report(report_of(gone, complete=False))
    assert text.count("rank 0 was killed") >= 2
    assert "<svg" not in text
    assert "The run did not come to its end" in text


def test_an_empty_report_is_a_page() -> None:
    assert "<title>Energy report: nothing to show</title>" in render_report(report_of())


def test_the_trend_is_drawn_with_its_change_point() -> None:
    record = record_of("t.py::test_it")
    points = [
        TrendPoint(f"2026-01-0{i}T00:00:00Z", f"c0ffee{i}", 1.0 + i / 10, changed=i == 4) for i in range(1, 7)
    ]
    points[2] = TrendPoint("2026-01-03T00:00:00Z", None, 1.3, 1.2, 1.4, broke=True)
    trend = Trend("t.py::test_it", "energy_j", "J", points)
    text = render_report(report_of(record), [trend, Trend("t.py::other", "energy_j", "J", points)])
    assert text.count("<h3>Trend</h3>") == 1
    assert "change point" in text
    assert {"c0ffee4", "1.4", "other devices", "1.2"} <= Reader(text).cells()
    assert "<title>2026-01-04T00:00:00Z c0ffee4: 1.4 J</title>" in text


def test_windows_in_the_round_are_named() -> None:
    (record, *_) = REPORT.records
    window = Window(
        name="prompt",
        start_s=100.6,
        duration_s=0.5,
        energy_j=2.0,
        energy_u_j=0.1,
        energy_u_absolute_j=0.2,
        by_domain={},
    )
    text = render_report(report_of(msgspec.structs.replace(record, windows=[*record.windows, window])))
    assert "Windows of energy_meter in it: prompt." in text


def test_an_estimate_is_called_one() -> None:
    (record, *_) = REPORT.records
    trace = record.power_trace
    assert trace is not None
    guessed = {
        name: msgspec.structs.replace(course, kind="estimated") for name, course in trace.by_domain.items()
    }
    estimated = msgspec.structs.replace(trace, by_domain=guessed)
    text = render_report(report_of(msgspec.structs.replace(record, power_trace=estimated)))
    assert "<h3>Power in a round, estimated</h3>" in text
    assert "estimated" not in render_report(report_of(record)).partition("<h2>Tests</h2>")[2]


def test_records_without_a_power_trace_have_a_page() -> None:
    text = render_report(report_of(record_of(power_trace=None)))
    assert "Rounds in order" in text
    assert "Power in a round" not in text


def odd(**changes: Any) -> Comparison:
    made = {
        "id": TEST,
        "metric": "energy_j",
        "unit": "J",
        "verdict": "regressed",
        "reason": "because",
        **changes,
    }
    return msgspec.convert(made, Comparison)


NO_RULE = {"threshold": 0.0, "threshold_absolute": 0.0, "floor": 0.0, "tolerance": 0.0, "alpha": 0.05}


@pytest.mark.parametrize(
    "comparison",
    [
        odd(ratio=1.1),
        odd(ratio=0.0, low=0.0, high=0.0),
        odd(ratio=1e9, low=1e8, high=1e10, noise=2.0, detectable=50.0),
        odd(ratio=1.0, low=1.0, high=1.0, noise=0.0, detectable=0.0, rule=NO_RULE),
        odd(metric="metric_of_a_later_version", ratio=1.1, low=1.0, high=1.2),
    ],
    ids=["no limits", "zero", "huge", "nothing moves", "unknown metric"],
)
def test_odd_comparisons_are_shown(comparison: Comparison) -> None:
    text = render_report(report_of(record_of(comparisons=[comparison])))
    assert change(comparison) in Reader(text).cells()


STEPS = {"falling": [1.0, 0.0, 2.0], "too few": [0.0, 1.0], "none": []}


@pytest.mark.parametrize("edges_s", STEPS.values(), ids=STEPS)
def test_a_course_of_power_that_is_none_is_left_out(edges_s: list[float]) -> None:
    course = DomainPower(kind="measured", edges_s=edges_s, power_w=[1.0, 2.0])
    trace = PowerTrace(start_s=1.0, duration_s=1.0, by_domain={"cpu:host": course})
    assert "Power in a round" not in render_report(report_of(record_of(power_trace=trace)))


@pytest.mark.parametrize(
    "rounds",
    [
        [round_of(5.0)],
        [round_of(None, temperature_start_c=50.0)] * 3,
        [round_of(-5.0), round_of(0.0)],
        [round_of(1e-9, duration_s=1e-9), round_of(1e9)],
        [round_of(5.0, tokens=Tokens(input=1, output=0))] * 2,
        [],
    ],
    ids=["one", "no joules", "below zero", "far apart", "no output", "none"],
)
def test_odd_rounds_are_shown(rounds: list[Round]) -> None:
    text = render_report(report_of(record_of(rounds=rounds)))
    table = text.partition("<caption>Rounds</caption>")[2].partition("</table>")[0]
    assert table.count("<tr><td>") == len(rounds)


def test_a_test_that_one_side_has_not_measured_is_shown(pair: Pair) -> None:
    record = pair.base.records[0]
    skipped = Record(id=record.id, attempt=1, status="skipped", reason="no GPU today")
    base, head = report_of(record), report_of(skipped)
    compared = compare_reports(base, head, ("base.json", "head.json"), [Asked(gated=True)])
    text = render_compared(base, head, compared, pairs="6+6")
    assert "head is skipped (no GPU today)" in text
    assert "Rounds in order" in text
    assert "base 8" in Reader(text).cells()


def test_a_round_that_cannot_have_been_is_told_in_a_line(files: Path, capsys: Command) -> None:
    broken = record_of(rounds=[round_of(5.0, iterations=0)], metrics={})
    (files / "broken.json").write_bytes(encode(report_of(broken)))
    assert main(["report", "broken.json", "--html", "out.html"]) == 2
    assert capsys.readouterr().err == (
        f"llenergy: {TEST}: round 1 of head has 0 iterations in 2 s; no report of pytest "
        "--energy-report has such a round\n"
    )


def test_many_tests_are_shown_in_tables_only(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(pages, "MOST_SHOWN", 2)
    text = render_compared(pair.base, pair.head, pair.compared)
    assert text.count('<details class="test"') == 2
    assert "5 more tests are in the tables only." in text
    targets = set(re.findall('href="#(t[0-9]+)"', text))
    assert targets == {"t1", "t2"}


def test_fifty_tests_of_two_sides_stay_below_three_megabytes(compared_page: str) -> None:
    """By the largest section of a test; the rest, and a row of each table, is far below a tenth of that."""
    _, *sections = compared_page.partition('<section class="closing">')[0].split('<details class="test"')
    assert len(sections) == 7
    assert 50 * max(len(section.encode()) for section in sections) < 2.7e6


def test_the_page_is_the_same_whatever_the_users_settings_are(pair: Pair, report_page: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 33, "svg.fonttype": "path", "axes.grid": False}):
        assert render_report(pair.head) == report_page
        assert matplotlib.rcParams["font.size"] == 33


def test_ids_are_there_once_and_what_is_referred_to_is_there(compared_page: str) -> None:
    attributes = Reader(compared_page).attributes
    ids = Counter(content for _, name, content in attributes if name == "id")
    assert set(ids.values()) == {1}
    referred = {content[1:] for _, name, content in attributes if name == "href" and content[0] == "#"}
    referred |= set(re.findall(r"url\(#([^)]+)\)", compared_page))
    assert referred
    assert referred <= set(ids)


HOSTILE = [
    "</script><script>hacked=1</script>",
    "</title></style></svg></table><img src=x onerror=hacked=1>",
    "\"><svg onload=hacked=1>' onmouseover='hacked=1",
    "javascript:hacked=1",
    "<a href=javascript:hacked=1>x</a>",
    "{{ 7 * 7 }} {% raw %} $x^2$ \\frac{1}{2}",
    "<!-- ]]> &lt;b&gt; &#60;b&#62;",
    "\x00\x1b[31m\x7f\u202etxt.exe\u202c\ud800 \u2028",
    "<use href='http://evil.example/x.svg#a'/> url(http://evil.example)",
    'style="background:url(http://evil.example)" 漢字 🔥',
]


def hostile_pair() -> Pair:
    """Two reports in which every text is somebody's attack, as far as it can come out of a file."""
    pair = pair_of([f"t.py::test[{text}]" for text in HOSTILE[:2]])

    def spoiled(report: Report) -> Report:
        text = encode(report).decode()
        for place, plain in enumerate(
            ("abc", "AMD EPYC 9354", "bench-7", "temperature", "transformers", "GPU-a")
        ):
            escaped = msgspec.json.encode(HOSTILE[place].replace("\ud800", "")).decode()[1:-1]
            text = text.replace(f'"{plain}"', f'"{escaped}"')
        return msgspec.json.decode(text.encode(), type=Report)

    flag = Flag(name=HOSTILE[6], severity="warning", detail=HOSTILE[7])
    sides: list[Report] = []
    for report in (spoiled(pair.base), spoiled(pair.head)):
        params = {text: text for text in HOSTILE}
        records = [
            msgspec.structs.replace(
                record, params=params, flags=[flag], reason=HOSTILE[8], fallback=HOSTILE[9]
            )
            for record in report.records
        ]
        sides.append(msgspec.structs.replace(report, records=records))
    comparisons = [
        msgspec.structs.replace(each, notes=[*HOSTILE], reason=HOSTILE[7])
        for each in pair.compared.comparisons
    ]
    source = msgspec.structs.replace(pair.compared.head, commit=HOSTILE[0], origin=HOSTILE[1])
    compared = msgspec.structs.replace(
        pair.compared, comparisons=comparisons, head=source, base=source, devices=HOSTILE, notes=HOSTILE
    )
    return Pair(sides[0], sides[1], compared)


@cache
def hostile_shown() -> str:
    """Their page."""
    pair = hostile_pair()
    name = pair.head.records[0].id
    trend = Trend(name, HOSTILE[3], HOSTILE[1], [TrendPoint(HOSTILE[7], HOSTILE[0], 1.0, changed=True)])
    return render_compared(pair.base, pair.head, pair.compared, [trend], pairs=HOSTILE[1])


@pytest.fixture(scope="module")
def hostile_page() -> str:
    return hostile_shown()


def test_no_text_becomes_markup(hostile_page: str, compared_page: str) -> None:
    found, ours = Reader(hostile_page), Reader(compared_page)
    assert set(found.tags) <= set(ours.tags) | {"title"}
    assert "script" not in found.tags
    assert {name for _, name, _ in found.attributes} <= {name for _, name, _ in ours.attributes}
    for tag, name, content in found.attributes:
        assert not name.startswith("on")
        if name in ("href", "src"):
            assert content.startswith("#") or (tag, content) == ("link", "data:,")
        if "url(" in content and name not in ("aria-label",):
            assert content.startswith("url(#")
        assert name != "style"


def test_nothing_that_cannot_be_seen_is_left(hostile_page: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in hostile_page)
    hostile_page.encode()
    assert "\\x00\\x1b[31m\\x7f\\u202etxt.exe\\u202c\\ud800" in hostile_page
    assert "\\u2028" not in HOSTILE[7]


@pytest.mark.parametrize("unseen", ["\x1b[31m", "\x07", "\x00", "\ufffe", "\u202e"])
def test_what_cannot_be_seen_is_an_escape_in_figures_too(unseen: str) -> None:
    escape = unseen.encode("unicode_escape").decode()
    name = f"t.py::t[{unseen}]"
    record = record_of(name, comparisons=[odd(id=name, unit=unseen, ratio=1.1)])
    trend = Trend(name, f"m{unseen}", f"u{unseen}", [TrendPoint("2026-01-04T00:00:00Z", None, 1.0)])
    text = render_report(report_of(record), [trend])
    assert all(each.isprintable() or each == "\n" for each in text)
    figures = "".join(re.findall("<text.*?</text>", text))
    assert f"t[{escape}]" in figures
    assert f"m{escape}, u{escape}" in figures


def test_a_long_id_is_cut_in_the_tables() -> None:
    long = "x" * 5000
    name = f"t.py::t[{long}]"
    record = record_of(name, comparisons=[odd(id=name, ratio=1.1)], params={long: long})
    reader = Reader(render_report(report_of(record)))
    assert any(cell.startswith("t.py::t[xx") for cell in reader.cells())
    assert any(cell.startswith("parameter xx") for cell in reader.cells())
    assert max(map(len, reader.cells())) <= 300
    assert name in reader.texts


def test_a_page_shows_no_secret_of_an_address() -> None:
    report = report_of(record_of())
    argv = ["--energy-compare=http://bob:hunter2@host/main.json?token=s3cret"]
    text = render_report(msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, argv=argv)))
    assert "--energy-compare=http://host/main.json" in Reader(text).cells()


def test_the_texts_are_still_there(hostile_page: str) -> None:
    shown = "".join(Reader(hostile_page).texts)
    for text in (*HOSTILE[:7], HOSTILE[8], HOSTILE[9]):
        assert text in shown


def test_the_browser_is_told_to_run_and_fetch_nothing(compared_page: str) -> None:
    import base64
    import hashlib

    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', compared_page)
    style = compared_page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = dict(
        rule.split(" ", 1) for rule in policy.replace("&#39;", "'").replace("&#43;", "+").split("; ")
    )
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_the_sum_of_domains_is_taken_where_all_are_known() -> None:
    edges, powers = total([([0.0, 1.0, 2.0], [10.0, 20.0]), ([0.5, 1.5, 3.0], [1.0, 2.0])])
    assert (edges, powers) == ([0.5, 1.0, 1.5, 2.0], [11.0, 21.0, 22.0])
    joules = sum(watts * (b - a) for (a, b), watts in zip(pairwise(edges), powers, strict=True))
    assert joules == pytest.approx(0.5 * 10 + 20 + 1 * 1.0 + 0.5 * 2)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, joules in (("base.json", LEVEL), ("head.json", scaled(1.1))):
        Path(name).write_bytes(encode(report_of(record_of(joules=joules))))
    return tmp_path


def test_the_command_writes_the_page_of_a_report(files: Path, capsys: Command) -> None:
    assert main(["report", "base.json", "--html", "energy.html"]) == 0
    assert capsys.readouterr() == ("energy.html: 1 records\n", "")
    assert (files / "energy.html").read_text("utf-8") == render_report(report_of(record_of()))


def test_a_comparison_is_written_and_has_its_exit_code(files: Path, capsys: Command) -> None:
    assert main(["compare", "base.json", "head.json", "--format", "html", "-o", "out.html"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    text = (files / "out.html").read_text("utf-8")
    assert main(["compare", "base.json", "head.json", "--format=html"]) == 1
    assert capsys.readouterr().out == text
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_without_the_extra_one_line_says_so(
    files: Path, library: str, monkeypatch: pytest.MonkeyPatch, capsys: Command
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    why = f"import of {library} halted; None in sys.modules"
    line = f"HTML needs jinja2 and matplotlib ({why}): pip install 'pytest-llenergy[html]'\n"
    assert main(["report", "base.json", "--html", "out.html"]) == 2
    assert capsys.readouterr() == ("", f"llenergy: {line}")
    assert main(["compare", "base.json", "head.json", "--format=html"]) == 2
    assert capsys.readouterr() == ("", f"llenergy compare: {line}")
    assert not (files / "out.html").exists()


def test_a_page_that_cannot_be_written_is_told(files: Path, capsys: Command) -> None:
    assert main(["report", "base.json", "--html", "nowhere/out.html"]) == 2
    told = "llenergy: nowhere/out.html: could not be written (No such file or directory)\n"
    assert capsys.readouterr().err == told
