# SPDX-License-Identifier: Apache-2.0
"""The page: what is in it, and that it is the same every time."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from random import Random

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.history.trend import Trend, TrendPoint
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.record.comparison import VERDICTS, Baseline, Comparison
from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint, slo
from pytest_llenergy.record.power_trace import DomainPower, PowerTrace
from pytest_llenergy.record.quantity import format_pair
from pytest_llenergy.record.record import Record, Round, Tokens, WindowRecord
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.served import ServedRequests
from pytest_llenergy.report.html import page as pages
from pytest_llenergy.report.html.cases import report_cases
from pytest_llenergy.report.html.comparison_charts import forest_plot
from pytest_llenergy.report.html.labels import name_cases
from pytest_llenergy.report.html.page import render_compared, render_report
from pytest_llenergy.report.html.round_charts import sum_step_functions
from pytest_llenergy.report.html.scatter import pareto_front
from pytest_llenergy.report.html.svg import open_sheet
from pytest_llenergy.report.verdicts import format_change, format_value

from ..compare.runs import LEVEL, TEST, record_of, report_of, round_of
from ..record.reports import REPORT
from .pages import LONG_REASON, Pair, decode_record, load_curve, odd, run_shown
from .reading import Reader


def test_the_verdicts_come_worst_first(compared_page: str) -> None:
    chips = re.findall(r'<summary><span class="chip [a-z-]+">([a-z ]+)<', compared_page)
    assert chips == ["regressed", "invalid", "inconclusive", "improved", "new", "removed", "unchanged"]
    (title,) = re.findall("<title>(.*?)</title>", compared_page.partition("<style>")[0])
    assert title == (
        "Energy comparison: 1 regressed, 1 invalid, 1 inconclusive, 1 improved, 1 new, 1 removed, 1 unchanged"
    )


def test_marks_in_the_chart_of_verdicts_have_the_colours_of_its_legend() -> None:
    comparisons = [
        Comparison(
            id="t.py::a",
            metric="energy_j",
            unit="J",
            verdict=verdict,
            reason="why",
            ratio=1.1,
            base=1,
            head=1.1,
        )
        for verdict in VERDICTS
    ]
    with open_sheet() as sheet:
        plot = forest_plot(sheet, comparisons, "forest")
    assert plot is not None
    for name in ("regressed", "improved", "inconclusive", "invalid", "unchanged"):
        assert f"var(--{name})" in sheet.css
    assert {"dot not-comparable", "dot invalid"} <= {each.look for each in plot.legend}
    assert "(-)" not in (plot.wide or "")


def test_metrics_of_one_test_have_different_labels_in_the_chart_of_verdicts() -> None:
    names = ("energy_per_output_token_j", "energy_per_input_token_j", "prefill_energy_per_input_token_j")
    shown = [
        Comparison(
            id="benchmarks/test_some.py::test_decode_of_many_tokens[transformers-small-8-float32-long]",
            metric=name,
            unit="J/token",
            verdict="unchanged",
            reason="why",
            ratio=1.0,
            base=1,
            head=1,
        )
        for name in names
    ]
    with open_sheet() as sheet:
        plot = forest_plot(sheet, shown, "forest")
    assert plot is not None
    for figure in (plot.svg, plot.wide or ""):
        assert all(f" · {name}</text>" in figure for name in names)
        assert all(f": {name}: +0.0%, unchanged" in figure for name in names)


def test_a_limit_of_nothing_ends_beyond_the_axis() -> None:
    """A change of -100 % has no place on an axis of ratios; a report from elsewhere may hold less."""
    spans = []
    for low in (0.5, 0.0, -1.3):
        shown = Comparison(
            id="t.py::a",
            metric="loss",
            unit="",
            verdict="inconclusive",
            reason="why",
            ratio=1.0,
            low=low,
            high=1.3,
            base=1,
            head=1,
        )
        with open_sheet() as sheet:
            plot = forest_plot(sheet, [shown], "forest")
        assert plot is not None
        spans.append(re.findall(r'd="M(-?[\d.]+) [\d.]+H', plot.svg)[0])
    assert float(spans[0]) > 0 > float(spans[1])
    assert spans[1] == spans[2]


def test_short_times_have_an_axis_in_small_units_without_a_power_of_ten() -> None:
    quick = [
        msgspec.structs.replace(
            round_of(3.5e-5 + 1e-6 * number), duration_s=1e-5 + 1e-7 * number, iterations=1
        )
        for number in range(6)
    ]
    page = render_report(report_of(record_of(rounds=quick)))
    assert ">µs per iteration</text>" in page
    assert not re.findall(r">\d*e.\d+</text>", page)


def test_a_failure_is_named_beside_its_test_since_wide_tables_scroll() -> None:
    page = render_report(report_of(record_of(), record_of("t.py::broken", status="failed", reason="boom")))
    assert ["t.py::broken", "failed"] in [row[:2] for row in Reader(page).rows]


def test_every_number_of_a_comparison_is_in_a_table(pair: Pair, compared_page: str) -> None:
    cells = Reader(compared_page).cells()
    for each in pair.compared.comparisons:
        expected = [*format_pair(each.base, each.estimated_head, each.unit)]
        if each.rule_applied:
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
                    joules = round_.energy_j / round_.iterations
                    assert {format_value(joules), format_value(joules / 1e3)} & flat
                    assert format_value(round_.energy_j / round_.duration_s) in flat
            trace = record.power_trace
            if trace is None or "cpu:package-0" not in trace.by_domain:
                continue
            course = trace.by_domain["cpu:package-0"]
            for at_s, watts in zip(course.edges_s, course.power_w, strict=False):
                assert (f"{at_s:.6g}", format_value(watts)) in found


def test_rounds_measured_alternately_are_shown_alternately(pair: Pair, compared_page: str) -> None:
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


def test_machine_meters_and_rule_are_listed(compared_page: str) -> None:
    cells = Reader(compared_page).cells()
    assert {"AMD EPYC 9354, 64 usable", "NVIDIA H100, GPU-a, 80.0 GiB, 700 W", "gpu:GPU-a", "580.1"} <= cells
    assert {"3% or more", "more than 1%", "less than 5%"} <= cells


def test_the_hosts_of_a_cluster_are_described() -> None:
    here = REPORT.environment
    assert here is not None
    alike = here.with_hosts({"n1": here, "n2": here})
    text = render_report(report_of(record_of(), environment=alike))
    assert text.count("2 hosts of: AMD EPYC 9354 (64 CPUs), NVIDIA H100") == 2
    unlike = here.with_hosts({"n1": here, "n2": msgspec.structs.replace(here, driver="590.2")})
    cells = Reader(render_report(report_of(record_of(), environment=unlike))).cells()
    assert {"n1, n2", "580.1, 590.2", "driver: 580.1 (n1), 590.2 (n2)"} <= cells
    assert {"hardware of hosts", "memory of hosts", "differences of hosts"} <= cells


def test_loads_without_latencies_have_a_table_without_a_chart() -> None:
    cut = LoadPoint(request_rate=37.5, requests=100, rounds=1, within_slo=False, reason="ended-early: soon")
    curve = LoadCurve(points=[cut], slo=slo(ttft=0.5), between=(10.0, 40.0), reason="even 10 request/s")
    report = report_of(msgspec.structs.replace(record_of(), load_curve=curve))
    text = render_report(report)
    assert {"37.5", "exceeds"} <= Reader(text).cells()
    assert re.findall("<caption>(Loads.*?)</caption>", text) == ["Loads"]
    compared = compare_reports(report, report, ("base.json", "head.json"), [Criterion()])
    text = render_compared(report, report, compared)
    assert re.findall("<caption>(Loads.*?)</caption>", text) == ["Loads, base", "Loads, head"]


def test_loads_with_a_chart_are_listed_once() -> None:
    text = render_report(report_of(msgspec.structs.replace(record_of(), load_curve=load_curve())))
    assert re.findall("<caption>(Loads.*?)</caption>", text) == ["Loads"]


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
    assert "In the baseline but not in this run: t.py::test_gone" in text
    assert text.index("regressed</span> <span") < text.index("improved</span> <span")


def test_unmeasured_tests_have_a_reason_and_interrupted_runs_a_note() -> None:
    gone = Record(id="t.py::gone", attempt=1, status="crashed", reason="rank 0 was killed")
    text = render_report(report_of(gone, complete=False))
    assert text.count("rank 0 was killed") >= 2
    assert "<svg" not in text
    assert "The run did not finish" in text


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
    assert "<title>2026-01-04T00:00:00Z c0ffee4: 1.4 J, change point</title>" in text


def test_windows_in_the_round_are_named() -> None:
    (record, *_) = REPORT.records
    window = WindowRecord(
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


def test_an_estimate_is_labelled() -> None:
    (record, *_) = REPORT.records
    trace = record.power_trace
    assert trace is not None
    guessed = {
        name: msgspec.structs.replace(course, kind="estimated") for name, course in trace.by_domain.items()
    }
    estimated = msgspec.structs.replace(trace, by_domain=guessed)
    text = render_report(report_of(msgspec.structs.replace(record, power_trace=estimated)))
    assert "<h3>Power in a round, estimated</h3>" in text
    assert "estimated" not in render_report(report_of(record)).partition("<h2>Each test</h2>")[2]


def test_records_without_a_power_trace_have_a_page() -> None:
    text = render_report(report_of(record_of(power_trace=None)))
    assert "Rounds in order" in text
    assert "Power in a round" not in text


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
def test_unusual_comparisons_are_shown(comparison: Comparison) -> None:
    text = render_report(report_of(record_of(comparisons=[comparison])))
    assert format_change(comparison) in Reader(text).cells()


STEPS = {"falling": [1.0, 0.0, 2.0], "too few": [0.0, 1.0], "none": []}


@pytest.mark.parametrize("edges_s", STEPS.values(), ids=STEPS)
def test_a_malformed_power_trace_is_left_out(edges_s: list[float]) -> None:
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
def test_unusual_rounds_are_shown(rounds: list[Round]) -> None:
    text = render_report(report_of(record_of(rounds=rounds)))
    table = text.partition("<caption>Rounds</caption>")[2].partition("</table>")[0]
    assert table.count("<tr><td>") == len(rounds)


def test_a_test_measured_on_one_side_only_is_shown(pair: Pair) -> None:
    record = pair.base.records[0]
    skipped = Record(id=record.id, attempt=1, status="skipped", reason="no GPU today")
    base, head = report_of(record), report_of(skipped)
    compared = compare_reports(base, head, ("base.json", "head.json"), [Criterion(gated=True)])
    text = render_compared(base, head, compared, pairs="6+6")
    assert "the head test was skipped (no GPU today)" in text
    assert "Rounds in order" in text
    assert "base 8" in Reader(text).cells()


def test_many_tests_are_shown_in_tables_only(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(pages, "MAX_SECTIONS", 2)
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


def test_ids_are_unique_and_every_reference_resolves(compared_page: str) -> None:
    attributes = Reader(compared_page).attributes
    ids = Counter(content for _, name, content in attributes if name == "id")
    assert set(ids.values()) == {1}
    referred = {content[1:] for _, name, content in attributes if name == "href" and content[0] == "#"}
    referred |= set(re.findall(r"url\(#([^)]+)\)", compared_page))
    assert referred
    assert referred <= set(ids)


def test_domains_are_summed_over_their_common_range() -> None:
    edges, powers = sum_step_functions([([0.0, 1.0, 2.0], [10.0, 20.0]), ([0.5, 1.5, 3.0], [1.0, 2.0])])
    assert (edges, powers) == ([0.5, 1.0, 1.5, 2.0], [11.0, 21.0, 22.0])
    joules = sum(watts * (b - a) for (a, b), watts in zip(pairwise(edges), powers, strict=True))
    assert joules == pytest.approx(0.5 * 10 + 20 + 1 * 1.0 + 0.5 * 2)


def test_a_run_says_what_it_measured_at_the_top() -> None:
    top = run_shown().partition("<main>")[0]
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", top))
    assert facts == {
        "Machine": "AMD EPYC 9354 (64 CPUs), NVIDIA H100",
        "Model": "SmolLM2-135M-Instruct, m",
        "Backend": "transformers 1.0, llamacpp 1.0, openvino 1.0, transformers 5.0",
        "Energy": "measured (nvml)",
        "Commit": "abc on main (with changes)",
        "Run": "2026-01-02 03:04 UTC",
    }
    estimate = msgspec.structs.replace(REPORT.records[0].meters[0], kind="estimated")
    mixed = report_of(record_of("t.py::a"), record_of("t.py::b", meters=[estimate]))
    assert "<dd>mixed: 1 test measured, 1 test estimated</dd>" in render_report(mixed)


def test_a_run_shows_energy_against_speed_and_other_energies_in_order() -> None:
    text = run_shown()
    assert re.findall("<h3>(.*?)</h3>", text)[:6] == [
        "Energy against speed",
        "Energy, largest first",
        "test_decode by backend",
        "test_decode by batch_size",
        "test_decode: energy against latency",
        "Rounds in order",
    ]
    largest = text.partition("<h3>Energy, largest first</h3>")[2].partition("</svg>")[0]
    tips = re.findall("<title>(.*?): [0-9.]+ ± [0-9.]+ m?J</title>", largest)
    assert tips == [
        "test_pipeline · load",
        "test_pipeline · prefill",
        "test_embed",
        "test_sort_a_very_long_list",
        "test_tokenize",
    ]


def test_a_prefill_has_no_speed_and_an_estimate_is_not_called_measured() -> None:
    estimate = msgspec.structs.replace(REPORT.records[0].meters[0], kind="estimated")
    read = [round_of(each, tokens=Tokens(input=300, output=4)) for each in LEVEL]
    page = render_report(
        report_of(
            *(record_of(f"t.py::test_write{each}", meters=[estimate]) for each in range(2)),
            *(record_of(f"t.py::test_read{each}", rounds=read, meters=[estimate]) for each in range(2)),
        )
    )
    assert "<title>Energy report: 4 estimated</title>" in page
    assert not re.search(">measured<|> measured<", page)
    _, speed, energies = re.split("<h3>Energy(?: against speed|, largest first)</h3>", page)
    assert "test_write1" in speed
    assert "test_read" not in speed
    assert "test_read1" in energies.partition("</svg>")[0]


def test_every_reason_is_shown_once_with_its_tests() -> None:
    reasons = run_shown().partition("<h2>Why</h2>")[2].partition("</section>")[0]
    for text in (LONG_REASON, "the counter stood still", "shorter than a tick", "no GPU"):
        assert reasons.count(f">{text}<") == 1
    assert len(re.findall(r"test_gpu\[[01]\]</a>", reasons)) == 2
    assert "test_pipeline · sampling" in reasons


def test_metrics_without_a_value_are_folded() -> None:
    (shown, *_) = run_shown().split('<details class="test"')[1:]
    table = shown.partition("<caption>Metrics</caption>")[2].partition("</table>")[0]
    folded = shown.partition("<summary>Metrics without a value</summary>")[2].partition("</table>")[0]
    assert all("-" not in row for row in Reader(table).rows)
    assert any("prefill_energy_j" in cell for cell in Reader(folded).cells())
    assert "the workload has no phases" in Reader(folded).cells()


def test_a_single_result_is_shown_as_numbers() -> None:
    text = render_report(report_of(record_of("t.py::t", [1.25, 1.25, 1.25])))
    values = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text.partition('class="values"')[2]))
    # Three rounds of two iterations.
    assert values["energy per iteration"] == "625 ± 500 mJ"
    assert "<caption>Tests</caption>" not in text


@pytest.mark.parametrize(
    ("points", "more_is_better", "front"),
    [
        ([(1, 5), (2, 4), (3, 4.5), (4, 1)], False, [0, 1, 3]),
        ([(1, 5), (2, 4), (3, 4.5), (4, 1)], True, [3]),
        ([(1, 1), (2, 2), (3, 3)], True, [0, 1, 2]),
        ([(1, 2), (1, 1), (1, 1)], False, [1]),
        ([], True, []),
    ],
)
def test_the_front_has_the_points_that_none_beats(
    points: list[tuple[float, float]], more_is_better: bool, front: list[int]
) -> None:
    assert pareto_front(points, more_is_better=more_is_better) == front


def test_tests_are_named_by_what_differs() -> None:
    def names(*records: Record) -> list[str]:
        return list(name_cases(report_cases(report_of(*records))).values())

    decoded = [decode_record(backend, 8, Random(1)) for backend in ("llamacpp", "openvino")]
    assert names(*decoded) == ["llamacpp", "openvino"]
    smaller = decode_record("llamacpp", 1, Random(1))
    assert names(decoded[0], smaller) == ["batch_size=8", "batch_size=1"]
    by_id = [record_of(f"t.py::test_it[a-b{n}-c]") for n in (1, 2)]
    assert names(*by_id) == ["b1", "b2"]
    assert names(*by_id, record_of("t.py::test_alone")) == ["test_it b1", "test_it b2", "test_alone"]


def test_an_axis_of_a_metric_without_a_unit_has_its_name() -> None:
    def served(share: float) -> Report:
        ones = [1.0] * 10
        sent = ServedRequests(ones, ones, ones, [4] * 10, good=[place < 10 * share for place in range(10)])
        return report_of(record_of(rounds=[msgspec.structs.replace(round_of(j), served=sent) for j in LEVEL]))

    base, head = served(0.8), served(0.7)
    criterion = Criterion("slo_attainment", Rule(threshold=0.01, threshold_absolute=0.01), gated=True)
    compared = compare_reports(base, head, ("base", "head"), [criterion])
    text = render_compared(base, head, compared)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert "slo_attainment" in labels
    assert "Rounds in order, slo_attainment" in text
    assert "0.01 or more" in text
    trend = Trend(TEST, "accuracy", "1", [TrendPoint("2026-01-02T03:04:05Z", None, 0.8)])
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", render_report(base, [trend]))
    assert "accuracy" in labels
    assert "accuracy, 1" not in labels
