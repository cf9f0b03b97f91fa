# SPDX-License-Identifier: Apache-2.0
"""Photograph a run, light on a desktop, and a comparison, dark on a phone. The figures are made up."""

from __future__ import annotations

import shutil
import tempfile
from io import BytesIO
from pathlib import Path
from random import Random

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from pytest_llenergy.report.html.page import render_compared, render_report
from tests.compare.runs import report_of
from tests.report.pages import decode_record, names, pair_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

DESKTOP = {"width": 1180, "height": 860}
PHONE = {"width": 390, "height": 1180}


def photograph(images: Path) -> None:
    """Write ``html-light.png`` and ``html-dark.png``."""
    rng = Random(3)
    backends = ("transformers", "llamacpp", "openvino")
    records = [decode_record(backend, size, rng) for backend in backends for size in (1, 4, 8, 32)]
    pair = pair_of(names(6))
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise SystemExit(f"no Chromium on the path ({', '.join(BROWSERS)})")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        shown = Path(place) / "energy.html"
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        shown.write_text(render_report(report_of(*records)))
        light = browser.new_page(viewport=DESKTOP, color_scheme="light")
        light.goto(shown.as_uri())
        _save(light, images / "html-light.png")
        shown.write_text(render_compared(pair.base, pair.head, pair.compared, pairs="6+6"))
        dark = browser.new_page(viewport=PHONE, color_scheme="dark")
        dark.goto(shown.as_uri())
        _save(dark, images / "html-dark.png")
        browser.close()


def _save(page: Page, path: Path) -> None:
    """Save a screenshot with 64 colours, rare ones included, a third of the size."""
    picture = Image.open(BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
