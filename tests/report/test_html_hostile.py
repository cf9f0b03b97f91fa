# SPDX-License-Identifier: Apache-2.0
"""Nothing that a report says becomes markup, runs, or hides."""

from __future__ import annotations

import re
from functools import cache

import msgspec
import pytest

from pytest_llenergy.compare.history.trend import Trend, TrendPoint
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.report import Report, encode_report
from pytest_llenergy.report.html.page import render_compared, render_report

from ..compare.runs import record_of, report_of
from .pages import Pair, odd, pair_of
from .reading import Reader

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
        text = encode_report(report).decode()
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


def test_no_invisible_character_is_left(hostile_page: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in hostile_page)
    hostile_page.encode()
    assert "\\x00\\x1b[31m\\x7f\\u202etxt.exe\\u202c\\ud800" in hostile_page
    assert "\\u2028" not in HOSTILE[7]


@pytest.mark.parametrize("unseen", ["\x1b[31m", "\x07", "\x00", "\ufffe", "\u202e"])
def test_invisible_characters_are_escaped_in_plots(unseen: str) -> None:
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


def test_a_page_shows_no_secret_of_a_url() -> None:
    report = report_of(record_of())
    argv = ["--energy-compare=http://bob:hunter2@host/main.json?token=s3cret"]
    text = render_report(msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, argv=argv)))
    assert "--energy-compare=http://host/main.json" in Reader(text).cells()


def test_hostile_texts_are_shown_unchanged(hostile_page: str) -> None:
    shown = "".join(Reader(hostile_page).texts)
    for text in (*HOSTILE[:7], HOSTILE[8], HOSTILE[9]):
        assert text in shown


def test_the_content_security_policy_forbids_scripts_and_requests(compared_page: str) -> None:
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
