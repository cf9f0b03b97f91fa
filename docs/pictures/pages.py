# SPDX-License-Identifier: Apache-2.0
"""Photograph the page of a comparison, light on a desktop and dark on a phone. Its figures are made up."""

from __future__ import annotations

import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from pytest_llenergy.report.html.page import render_compared
from tests.report.pages import names, pair_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

DESKTOP = {"width": 1180, "height": 860}
PHONE = {"width": 390, "height": 1180}


def photograph(images: Path) -> None:
    """Write ``html-light.png`` and ``html-dark.png``."""
    pair = pair_of(names(6))
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise SystemExit(f"no Chromium on the path ({', '.join(BROWSERS)})")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        shown = Path(place) / "energy.html"
        shown.write_text(render_compared(pair.base, pair.head, pair.compared, [], pairs="6+6"))
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        light = browser.new_page(viewport=DESKTOP, color_scheme="light")
        light.goto(shown.as_uri())
        _save(light, images / "html-light.png")
        dark = browser.new_page(viewport=PHONE, color_scheme="dark")
        dark.goto(shown.as_uri())
        _scroll_to_first_test(dark)
        _save(dark, images / "html-dark.png")
        browser.close()


def _save(page: Page, path: Path) -> None:
    """Save a screenshot with 64 colours, a third of the size."""
    picture = Image.open(BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _scroll_to_first_test(page: Page) -> None:
    """Scroll to the first unfolded test."""
    page.locator("details").first.evaluate("element => element.scrollIntoView()")
