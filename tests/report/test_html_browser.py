# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: it shows, it runs nothing, it fetches nothing, on a phone and in the dark.

Needs Debian's chromium, or another one on the path. ``LLENERGY_TEST_CHROMIUM=required`` makes a missing one a
failure.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .pages import pair_shown
from .test_html_hostile import HOSTILE, hostile_shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}

#: Contrast that text needs (WCAG 2.1, 1.4.3).
LEAST_CONTRAST = 4.5

#: Contrast of each text that is seen with what is behind it, by the formula of WCAG 2.1, the lowest first.
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    required = os.environ.get("LLENERGY_TEST_CHROMIUM") == "required"
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        told = f"no Chromium on the path ({', '.join(BROWSERS)})"
        if required:
            pytest.fail(f"{told}, and LLENERGY_TEST_CHROMIUM=required")
        pytest.skip(told)
    if not required:
        pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root there is no sandbox.
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(pair_shown()[1], "utf-8")
    return file


class Visit:
    """A page that was opened, with all that the browser said and asked for."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        page: Page = self.context.new_page()
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.context.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())
        self.page = page

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_every_figure_is_seen_and_nothing_is_said_or_fetched(
    browser: Browser, page_file: Path, size: Any, scheme: Any
) -> None:
    with Visit(browser, page_file, viewport=size, color_scheme=scheme) as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        boxes = visit.page.evaluate(
            "[...document.querySelectorAll('svg.plot')].map(each => {"
            " const box = each.getBoundingClientRect();"
            " return [box.width, box.height, box.right, each.querySelectorAll('path, use, text').length]})"
        )
        assert len(boxes) >= 3 * 4 + 4
        for width, height, right, marks in boxes:
            assert width > 200
            assert height > 100
            assert right <= size["width"]
            assert marks > 5
        assert visit.said == []
        assert [url for url in visit.asked if not url.startswith("data:")] == [page_file.as_uri()]


def test_a_phone_need_not_be_scrolled_sideways(browser: Browser, page_file: Path) -> None:
    with Visit(browser, page_file, viewport=PHONE) as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert visit.page.evaluate(wide) == 0
        # Tables that are wider scroll by themselves.
        widest = "Math.max(...[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth))"
        assert visit.page.evaluate(widest) > PHONE["width"]
        sizes = visit.page.evaluate(
            "[...document.querySelectorAll('svg.plot text')].map(each => each.getBoundingClientRect().height)"
        )
        assert min(sizes) > 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_its_background(browser: Browser, page_file: Path, scheme: Any) -> None:
    with Visit(browser, page_file, viewport=DESKTOP, color_scheme=scheme) as visit:
        # More numbers look like the others.
        visit.page.evaluate("document.querySelectorAll('.test').forEach(each => each.open = true)")
        found = visit.page.evaluate(CONTRASTS)
        assert len(found) > 500
        assert found[0][0] >= LEAST_CONTRAST, found[:5]


def test_the_dark_is_dark(browser: Browser, page_file: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        with Visit(browser, page_file, color_scheme=scheme) as visit:
            text = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
            grounds.append(sum(map(int, re.findall(r"\d+", text))))
    light, dark = grounds
    assert light > 3 * 240
    assert dark < 3 * 40


def test_without_scripts_the_tables_hold_the_numbers(browser: Browser, page_file: Path) -> None:
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
                    assert f"{round_.energy_j / round_.iterations:.4g}" in cells


def test_nothing_hostile_runs(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(hostile_shown(), "utf-8")
    with Visit(browser, file, viewport=PHONE) as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        for place in visit.page.locator("svg text").all()[:10]:
            place.hover(force=True)
        assert visit.page.evaluate("typeof hacked") == "undefined"
        assert visit.page.evaluate("document.querySelectorAll('script, img, iframe, object').length") == 0
        assert visit.said == []
        assert [url for url in visit.asked if not url.startswith("data:")] == [file.as_uri()]
        assert HOSTILE[0] in visit.page.locator("body").inner_text()


def test_a_link_in_the_table_opens_its_test(browser: Browser, page_file: Path) -> None:
    with Visit(browser, page_file, viewport=DESKTOP) as visit:
        link = visit.page.locator("td.name a").last
        target = str(link.get_attribute("href"))
        link.click()
        assert visit.page.url.endswith(target)
        assert visit.page.locator(f"{target} > summary").is_visible()
