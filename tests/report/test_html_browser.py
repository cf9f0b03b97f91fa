# SPDX-License-Identifier: Apache-2.0
"""Pages in a real browser: on a phone and on a desktop, light and dark, alone without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from ..compare.test_history_page import history_shown
from .test_html import hostile_shown, pair_shown, run_shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES: dict[str, Callable[[], str]] = {
    "run": run_shown,
    "pair": pair_shown,
    "history": history_shown,
    "hostile": hostile_shown,
}

#: Marks, names and numbers of a chart that stick out of its figure.
OUTSIDE = """() => [...document.querySelectorAll("figure")].flatMap(figure => {
  const box = figure.getBoundingClientRect();
  return [...figure.querySelectorAll("text, path, line, rect")].filter(each => {
    const own = each.getBoundingClientRect();
    const isInside = own.left >= box.left && own.right <= box.right && own.bottom <= box.bottom;
    return own.width && !(isInside && own.top >= box.top);
  }).map(each => each.outerHTML);
})"""

#: Tables whose last column cannot be reached by scrolling their box.
UNREACHABLE = """() => [...document.querySelectorAll(".scroll")].filter(box => {
  box.scrollLeft = 1e6;
  const last = box.querySelector("th:last-child").getBoundingClientRect();
  return last.width && last.right > box.getBoundingClientRect().right + 1;
}).length"""

#: Numbers below a chart that cover each other.
CLASHES = """() => [...document.querySelectorAll(".chart, .rows")].flatMap(chart => {
  const all = [...chart.querySelectorAll(":scope > .middle")].map(each => each.getBoundingClientRect());
  const clash = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return all.filter((a, place) => a.width && all.slice(place + 1).some(b => b.width && clash(a, b)));
}).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("LLENERGY_TEST_CHROMIUM") == "required":
            pytest.fail("no Chromium on the path")
        pytest.skip("no Chromium on the path")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # The sandbox does not work for root.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(
    browser: Browser, path: Path, width: int, scheme: Literal["light", "dark"]
) -> tuple[Page, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    return page, seen


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_asks_for_nothing(browser: Browser, tmp_path: Path, name: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), "utf-8")
    schemes: list[tuple[int, Literal["light", "dark"]]] = [(400, "light"), (1280, "dark"), (1700, "light")]
    for width, scheme in schemes:
        page, seen = open_page(browser, path, width, scheme)
        assert seen == [path.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(UNREACHABLE) == 0
        assert page.evaluate(CLASHES) == 0
        assert page.evaluate("window.hacked") is None
        assert not page.query_selector_all("script, img, iframe, object, embed")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(18, 22, 27)") == (scheme == "dark")
        page.close()


def test_names_do_not_cover_each_other(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(run_shown(), "utf-8")
    for width in (400, 1280):
        page, _ = open_page(browser, path, width, "light")
        boxes = [each.bounding_box() for each in page.query_selector_all(".chart path + text")]
        found = sorted((box["y"], box["height"]) for box in boxes if box)
        assert len(found) >= 2
        assert all(y + 0.8 * height < below for (y, height), (below, _) in pairwise(found))
        page.close()


def test_a_page_prints_whole_tables(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(pair_shown(), "utf-8")
    page, _ = open_page(browser, path, 1000, "dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    page.close()
