# SPDX-License-Identifier: Apache-2.0
"""Photograph the pages of a run, a comparison and a history at three widths. The figures are made up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.report import Report, RunInfo, Source, encode_report
from pytest_llenergy.report.html.page import render_compared, render_report
from tests.compare.runs import report_of
from tests.report.pages import decode_record, names, pair_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

Scheme = Literal["light", "dark"]

#: Widths of windows, of a phone, a laptop and a large screen, and the part of a page that is shown.
WIDTHS, HEIGHT = (400, 1000, 1700), 1400

#: Pixels between pictures and their colour, and the number of colours.
GAP, GREY, COLOURS = 24, (128, 128, 128), 128

#: Sessions of the history, in which one test changes by so much at the second number.
SESSIONS, CHANGED, STEP = 40, 27, 1.05


def run(seed: int = 3) -> Report:
    """Twelve decode tests of three backends."""
    rng = Random(seed)
    backends = ("transformers", "llamacpp", "openvino")
    return report_of(*(decode_record(backend, size, rng) for backend in backends for size in (1, 4, 8, 32)))


def history_page(folder: Path) -> str:
    """Keep a session of three tests for each of some days, and render the history."""
    rng = Random(5)
    for day in range(SESSIONS):
        whole, factor = run(day), rng.gauss(1, 0.006) * (STEP if day >= CHANGED else 1)
        records = []
        for place, record in enumerate(whole.records[1:4]):
            scale = factor if place == 0 else rng.gauss(1, 0.006)
            rounds = [
                msgspec.structs.replace(each, energy_j=(each.energy_j or 0.0) * scale)
                for each in record.rounds
            ]
            metrics = compute_metrics(rounds, None)
            records.append(msgspec.structs.replace(record, rounds=rounds, metrics=metrics))
        started = f"2026-{day // 28 + 3:02}-{day % 28 + 1:02}T03:04:05Z"
        info = RunInfo(
            id=f"run-{day}", started_at=started, finished_at=started, complete=True, argv=[], exit_status=0
        )
        source = Source(commit=f"{day:04x}" + "cafe" * 9, branch="main", dirty=False)
        made = msgspec.structs.replace(whole, run=info, source=source, records=records)
        (folder / f"{day}.json").write_bytes(encode_report(made))
    command = [str(Path(sys.executable).with_name("llenergy")), "history"]
    subprocess.run([*command, "add", *(f"{day}.json" for day in range(SESSIONS))], cwd=folder, check=True)
    subprocess.run([*command, "show", "--format=html", "--output=history.html"], cwd=folder, check=True)
    return (folder / "history.html").read_text()


def render_pages() -> dict[str, str]:
    """Return the pages by their names."""
    pair = pair_of(names(6))
    with tempfile.TemporaryDirectory() as folder:
        return {
            "run": render_report(run()),
            "comparison": render_compared(pair.base, pair.head, pair.compared, pairs="6+6"),
            "history": history_page(Path(folder)),
        }


@contextmanager
def start_browser() -> Iterator[Browser]:
    """Start the Chromium of the machine."""
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise SystemExit(f"no Chromium on the path ({', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def shoot(
    browser: Browser, page: str, width: int, scheme: Scheme, height: int | None = HEIGHT
) -> Image.Image:
    """Return a picture of a page, or of its first ``height`` pixels."""
    window = browser.new_page(viewport={"width": width, "height": height or HEIGHT}, color_scheme=scheme)
    window.set_content(page)
    picture = Image.open(BytesIO(window.screenshot(full_page=height is None))).convert("RGB")
    window.close()
    return picture


def photograph(images: Path) -> None:
    """Write ``page-run.png``, ``page-comparison.png`` and ``page-history.png``, each with three widths.

    The variable LLENERGY_SHOTS names a folder for pictures of whole pages, light and dark, to look at.
    """
    whole = os.environ.get("LLENERGY_SHOTS")
    schemes: dict[str, Scheme] = {"run": "light", "comparison": "dark", "history": "light"}
    with start_browser() as browser:
        for name, page in render_pages().items():
            shots = [shoot(browser, page, width, schemes[name]) for width in WIDTHS]
            side_by_side = Image.new("RGB", (sum(WIDTHS) + GAP * (len(WIDTHS) - 1), HEIGHT), GREY)
            left = 0
            for shot in shots:
                side_by_side.paste(shot, (left, 0))
                left += shot.width + GAP
            # Few colours: a third of the size.
            side_by_side.quantize(COLOURS, dither=Image.Dither.NONE).save(
                images / f"page-{name}.png", optimize=True
            )
            for width in WIDTHS if whole else ():
                for scheme in ("light", "dark"):
                    shot = shoot(browser, page, width, scheme, None)
                    shot.save(Path(whole or "") / f"{name}-{width}-{scheme}.png")
