# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: plots are visible, nothing runs and nothing is fetched.

Needs Debian's chromium or another one on the path. With ``LLENERGY_TEST_CHROMIUM=required`` a missing one
fails the tests.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_llenergy.report.html.page import render_report

from ..compare.runs import record_of, report_of
from ..compare.test_history_page import history_shown
from .pages import LONG_REASON, load_curve, pair_shown, run_shown
from .test_html_hostile import HOSTILE, hostile_shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}

#: Widths of a phone, a laptop and a large screen.
WIDTHS = (400, 1280, 1700)

#: Counts texts in charts, and returns those that overlap another text or a mark with a tooltip.
COVERED = """() => {
  const box = each => each.getBoundingClientRect();
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  let count = 0;
  const found = [];
  for (const svg of document.querySelectorAll('svg.plot')) {
    if (!svg.getClientRects().length) continue;
    const texts = [...svg.querySelectorAll('text')];
    // A curve is as large as its chart, in which there is no text.
    const marks = [...svg.querySelectorAll('title')].map(each => each.parentElement)
      .filter(each => each.tagName == 'use' || box(each).height < 30);
    count += texts.length;
    texts.forEach((text, place) => {
      for (const other of [...texts.slice(place + 1), ...marks])
        if (overlap(box(text), box(other)))
          found.push([svg.getAttribute('aria-label').slice(0, 60), text.textContent, other.textContent]);
    });
  }
  return [count, found];
}"""

#: Contrast that WCAG 2.1 requires for text (1.4.3).
MIN_CONTRAST = 4.5

#: Contrast of each visible text with its background, by the formula of WCAG 2.1, lowest first.
CONTRASTS = """() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = element.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(parts(ink)), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


# Not longer: Playwright leaves an event loop running, in which later tests could not call asyncio.run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    required = os.environ.get("LLENERGY_TEST_CHROMIUM") == "required"
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        message = f"no Chromium on the path ({', '.join(BROWSERS)})"
        if required:
            pytest.fail(f"{message}, and LLENERGY_TEST_CHROMIUM=required")
        pytest.skip(message)
    if not required:
        pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox does not work for root.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(pair_shown()[1], "utf-8")
    return file


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "page.html"
    file.write_text(run_shown(), "utf-8")
    return file


@pytest.fixture(scope="module")
def history_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("history") / "page.html"
    file.write_text(history_shown(), "utf-8")
    return file


class Visit:
    """An open page, with the messages and requests of the browser."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.messages: list[str] = []
        self.requests: list[str] = []
        page: Page = self.context.new_page()
        page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        self.context.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        self.page = page

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    @property
    def fetched(self) -> list[str]:
        return [url for url in self.requests if not url.startswith("data:")]

    def open_all(self, selector: str = "details") -> None:
        self.page.evaluate(f"document.querySelectorAll('{selector}').forEach(each => each.open = true)")


@pytest.fixture(scope="module")
def visit(browser: Browser, page_file: Path) -> Iterator[Visit]:
    """One page for all tests that only look at it."""
    with Visit(browser, page_file, viewport=DESKTOP) as visit:
        yield visit


@pytest.fixture(scope="module")
def run_visit(browser: Browser, run_file: Path) -> Iterator[Visit]:
    """The page of one run, for all tests that only look at it."""
    with Visit(browser, run_file, viewport=DESKTOP) as visit:
        yield visit


@pytest.fixture(scope="module")
def history_visit(browser: Browser, history_file: Path) -> Iterator[Visit]:
    """The page of a history, for all tests that only look at it."""
    with Visit(browser, history_file, viewport=DESKTOP) as visit:
        yield visit


@pytest.mark.parametrize("width", WIDTHS)
def test_text_in_charts_covers_neither_data_nor_other_text(
    visit: Visit, run_visit: Visit, history_visit: Visit, width: int
) -> None:
    for each, texts in ((visit, 100), (run_visit, 100), (history_visit, 20)):
        each.page.set_viewport_size({"width": width, "height": 900})
        each.open_all()
        count, covered = each.page.evaluate(COVERED)
        assert count > texts
        assert covered == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_reason_is_readable_without_scrolling(run_visit: Visit, width: int) -> None:
    run_visit.page.set_viewport_size({"width": width, "height": 900})
    boxes = run_visit.page.evaluate(
        "[...document.querySelectorAll('.because')].map(each => {"
        " const box = each.getBoundingClientRect(), range = document.createRange();"
        " range.selectNodeContents(each); const text = range.getBoundingClientRect();"
        " return [each.innerText, box.left, text.right, getComputedStyle(each.parentElement).overflow]})"
    )
    others = ["the counter stood still", "shorter than a tick", "no GPU"]
    assert [text for text, *_ in boxes] == [LONG_REASON, *others]
    for _, left, right, overflow in boxes:
        assert 0 <= left < right <= width
        assert overflow == "visible"


def test_a_page_prints_in_light_colours_without_cutting_a_table(browser: Browser, run_file: Path) -> None:
    with Visit(browser, run_file, viewport=DESKTOP, color_scheme="dark") as visit:
        visit.page.emulate_media(media="print", color_scheme="dark")
        assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        visit.page.set_viewport_size({"width": 760, "height": 1000})
        widths = visit.page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth - each.clientWidth)"
        )
        assert max(widths) <= 0


def test_the_page_of_a_history_fits_phone_and_desktop(browser: Browser, history_file: Path) -> None:
    shown = {}
    for name, size in (("phone", PHONE), ("desktop", DESKTOP)):
        with Visit(browser, history_file, viewport=size) as visit:
            visit.open_all()
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert visit.page.evaluate(overflow) == 0
            marks = visit.page.locator("svg.plot:visible use:has(title)")
            shown[name] = marks.count()
            mark = visit.page.locator("svg.plot:visible use").filter(has_text="regressed").first
            box = mark.bounding_box()
            assert box is not None
            assert 0 < box["x"] < size["width"]
            assert visit.messages == []
            assert visit.fetched == [history_file.as_uri()]
    # Every session of both tests and the accepted step; on phones the latest 60 of the longer one.
    assert shown == {"phone": 60 + 3 + 1, "desktop": 120 + 3 + 1}


def test_a_link_in_the_table_opens_its_test(visit: Visit) -> None:
    link = visit.page.locator("td.name a").last
    target = str(link.get_attribute("href"))
    link.click()
    assert visit.page.url.endswith(target)
    assert visit.page.locator(f"{target} > summary").is_visible()


def test_text_contrasts_with_its_background(visit: Visit) -> None:
    # The other tables look the same.
    visit.open_all(".test")
    for scheme in ("light", "dark"):
        visit.page.emulate_media(color_scheme=scheme)
        contrasts = visit.page.evaluate(CONTRASTS)
        assert len(contrasts) > 500
        assert contrasts[0][0] >= MIN_CONTRAST, (scheme, contrasts[:5])


def test_the_background_follows_the_colour_scheme(visit: Visit) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        visit.page.emulate_media(color_scheme=scheme)
        text = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", text)))
    assert brightness["light"] > 3 * 240
    assert brightness["dark"] < 3 * 40


def test_every_plot_is_visible_on_phone_and_desktop(visit: Visit) -> None:
    visit.open_all()
    for size in (PHONE, DESKTOP):
        visit.page.set_viewport_size(size)
        boxes = visit.page.evaluate(
            "[...document.querySelectorAll('svg.plot')].map(each => {"
            " const box = each.getBoundingClientRect();"
            " return [box.width, box.height, box.right, each.querySelectorAll('path, use, text').length]})"
        )
        assert sum(width > 0 for width, *_ in boxes) >= 3 * 4 + 4
        for width, height, right, marks in boxes:
            if not width:
                # Drawn for the other width.
                continue
            assert width > 200
            assert height > 100
            assert right <= size["width"]
            assert marks > 5


def test_a_phone_does_not_scroll_sideways(visit: Visit) -> None:
    visit.page.set_viewport_size(PHONE)
    visit.open_all()
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visit.page.evaluate(overflow) == 0
    # Wider tables scroll by themselves.
    widest = "Math.max(...[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth))"
    assert visit.page.evaluate(widest) > PHONE["width"]
    sizes = visit.page.evaluate(
        "[...document.querySelectorAll('svg.plot text')].map(each => each.getBoundingClientRect().height)"
    )
    assert min(filter(None, sizes)) > 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_logs_nothing_and_fetches_nothing(browser: Browser, page_file: Path, scheme: Any) -> None:
    with Visit(browser, page_file, viewport=PHONE, color_scheme=scheme) as visit:
        visit.open_all()
        assert visit.messages == []
        assert visit.fetched == [page_file.as_uri()]


def test_tables_hold_the_numbers_without_scripts(browser: Browser, page_file: Path) -> None:
    with Visit(browser, page_file, java_script_enabled=False) as visit:
        cells = set(visit.page.locator("td").all_text_contents())
    pair, _ = pair_shown()
    for each in pair.compared.comparisons:
        if each.ratio is not None:
            assert f"{each.ratio - 1:+.1%}" in cells
    for report in (pair.base, pair.head):
        for record in report.records:
            for round_ in record.rounds:
                if round_.energy_j is not None:
                    joules = round_.energy_j / round_.iterations
                    assert {f"{joules:.4g}", f"{joules / 1e3:.4g}"} & cells


def test_hostile_text_does_not_run(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(hostile_shown(), "utf-8")
    with Visit(browser, file, viewport=PHONE) as visit:
        visit.open_all()
        for place in visit.page.locator("svg text").all()[:10]:
            place.hover(force=True)
        assert visit.page.evaluate("typeof hacked") == "undefined"
        assert visit.page.evaluate("document.querySelectorAll('script, img, iframe, object').length") == 0
        assert visit.messages == []
        assert visit.fetched == [file.as_uri()]
        assert HOSTILE[0] in visit.page.locator("body").inner_text()


@pytest.fixture(scope="module")
def loads_visit(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """The page of a test with several loads."""
    record = msgspec.structs.replace(record_of("test_serving.py::test_it"), load_curve=load_curve())
    file = tmp_path_factory.mktemp("loads") / "page.html"
    file.write_text(render_report(report_of(record)), "utf-8")
    with Visit(browser, file, viewport=DESKTOP) as visit:
        visit.open_all()
        yield visit


LOADS = "svg.plot[aria-label^='Energy and latency over load']:visible"


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_chart_shows_each_load_twice_and_the_maximum_in_both_panels(
    loads_visit: Visit, size: dict[str, int]
) -> None:
    page = loads_visit.page
    page.set_viewport_size(size)
    chart = page.locator(LOADS)
    assert chart.count() == 1
    box = chart.bounding_box()
    assert box is not None
    assert 200 < box["width"] <= size["width"]
    # Joules, TTFT and TPOT of eight loads.
    marks = chart.locator("use:has(title)")
    assert marks.count() == 3 * 8
    # Its line goes through both panels, at the load with the name above it.
    name = chart.locator("text", has_text="maximum 9.8").bounding_box()
    assert name is not None
    at_maximum = chart.locator("use").filter(has_text="9.8 request/s: 302").first.bounding_box()
    assert at_maximum is not None
    distance = at_maximum["x"] + at_maximum["width"] / 2 - (name["x"] + name["width"])
    assert abs(distance) < 12
    assert name["y"] < at_maximum["y"]
    assert page.locator(".key").filter(has_text="maximum load within the SLO").count() > 0
    tips = [each.text_content() for each in marks.locator("title").all()]
    assert "9.8 request/s: 302 ± 20 mJ/token, within" in tips
    assert "22.6 request/s: TTFT p99 9 s, saturated" in tips
    for mark in marks.all():
        at = mark.bounding_box()
        assert at is not None
        assert box["x"] <= at["x"] <= box["x"] + box["width"]
    count, covered = page.evaluate(COVERED)
    assert count > 20
    assert covered == []


def test_the_chart_has_a_text_alternative_and_its_numbers(loads_visit: Visit) -> None:
    label = loads_visit.page.locator(LOADS).get_attribute("aria-label") or ""
    assert "maximum load 9.8 request/s (10.1 exceeds it); SLO: TTFT <= 0.5 s, TPOT <= 0.05 s" in label
    assert "10.1 request/s: 299 mJ/token, TTFT p99 0.51 s, TPOT p99 0.0301 s, exceeds" in label
    numbers = loads_visit.page.locator("table:has-text('done/s')").first.inner_text()
    assert "302 ± 20 mJ" in numbers
