# SPDX-License-Identifier: Apache-2.0
"""HTML pages in a real browser, and the same facts in Markdown."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import open_project
from .made import at, record, write_report
from .project import Project

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

SIZES = (1, 2, 4, 8)
BASE = {f"test_decode[{n}]": at(100 + 10 * n, params={"batch_size": n}) for n in SIZES}
#: The first regresses.
HEAD = BASE | {"test_decode[1]": at(125, params={"batch_size": 1})}
HOSTILE = "test_<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name)) is not None), None)
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with the page of a run, and that of a comparison."""
    pytest.importorskip("jinja2")
    with open_project(tmp_path_factory.mktemp("pages")) as project:
        lost = {"attempt": 1, "status": "failed", "reason": "no such layer <b>"}
        write_report(project.path / "base.json", BASE | {HOSTILE: record([5.0] * 6), "test_lost": lost})
        write_report(project.path / "head.json", HEAD)
        run = project.llenergy("report", "base.json", "--format=html", "-o", "run.html")
        assert run.ret == 0, run.text
        pair = project.llenergy("compare", "base.json", "head.json", "--format=html", "-o", "pair.html")
        assert pair.ret == 1, pair.text
        yield project


def open_page(browser: Browser, path: Path) -> Page:
    """Open a page, which may neither run nor fetch anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    assert said == []
    return page


def test_a_run_shows_each_test_with_its_energy(browser: Browser, pages: Project) -> None:
    page = open_page(browser, pages.path / "run.html")
    text = page.inner_text("body")
    for word in ("NVIDIA H100", "transformers", "measured", "test_decode", "batch_size"):
        assert word in text, word
    # Tables may be folded.
    content = page.text_content("body") or ""
    for joules in ("110", "120", "140", "180"):
        assert re.search(rf"\b{joules}\b", content)
    assert "no such layer <b>" in content
    # Nothing of a report runs in the page.
    assert "owned" not in page.title()
    assert page.query_selector_all("script") == []
    assert HOSTILE in content
    page.close()


def test_figures_are_visible_and_pages_fit_a_phone(browser: Browser, pages: Project) -> None:
    for name in ("run.html", "pair.html"):
        page = open_page(browser, pages.path / name)
        figures = [figure for figure in page.query_selector_all("svg") if figure.is_visible()]
        boxes = [box for figure in figures if (box := figure.bounding_box()) is not None]
        assert any(box["width"] > 200 and box["height"] > 100 for box in boxes)
        page.set_viewport_size({"width": 390, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= 392
        page.close()


def test_a_comparison_shows_verdicts_and_limits(browser: Browser, pages: Project) -> None:
    page = open_page(browser, pages.path / "pair.html")
    content = page.text_content("body") or ""
    for word in ("regressed", "unchanged", "removed"):
        assert word in content
    assert not re.search(r"\bNaN\b|\bNone\b|undefined", page.inner_text("body"))
    page.close()
    shown = pages.llenergy("compare", "base.json", "head.json", "--format=markdown").out
    assert "regressed" in shown
    assert "<script" not in shown


def test_a_run_of_pytest_writes_a_page(browser: Browser, project: Project) -> None:
    project.write("test_it.py", "import time\ndef test_it(energy): energy(time.sleep, 0.1)\n")
    project.pytest("--energy-html", project.meter()).check(passed=1)
    page = open_page(browser, project.path / "energy.html")
    assert "test_it" in (page.text_content("body") or "")
    page.close()
