# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a history. ``tests/report/test_html_browser.py`` opens it in a browser."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history import add_run
from pytest_llenergy.report.html.history import render_page

from ..report.pages import HOSTILE, Reader
from .sessions import commit, day_of, series_of


@cache
def history_shown() -> str:
    """Two tests: one of 120 sessions with a step and outliers, one of a few sessions."""
    random = Random(1)
    values = [random.gauss(1.0, 0.01) * (1.05 if day >= 80 else 1.0) for day in range(120)]
    for day in (70, 100):
        values[day] *= 1.4
    return render_page("runs", [series_of(values), series_of([2.0, 2.1, 2.0], id="t.py::few")])


def test_every_session_has_a_mark_with_a_tooltip() -> None:
    tips = re.findall("<title>(.*?)</title>", history_shown())[1:]
    assert len(tips) == 123
    (changed,) = [each for each in tips if each.endswith(", change point")]
    assert changed.startswith(f"2026-03-25T03:04:05Z {commit(80)[:10]}: 1.0")


def test_changes_are_named() -> None:
    reader = Reader(history_shown())
    row = reader.row("t")
    assert re.fullmatch(rf"\+[45]\.\d% near {commit(80)[:10]}", row[-1])
    assert "1.30" not in reader.texts, "an outlier widens the axis"
    assert "1.00" in reader.texts


def test_hostile_text_is_not_markup() -> None:
    series = series_of(
        [1.0] * 9, id=HOSTILE[0], device=HOSTILE[1], commit="\x1b" + HOSTILE[3], unit=HOSTILE[1]
    )
    text = render_page(HOSTILE[1], [series])
    reader = Reader(text)
    assert set(reader.tags) <= set(Reader(history_shown()).tags)
    assert not any(name.startswith("on") for _, name, _ in reader.attributes)
    assert "\x1b" not in text


def test_the_command_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for day in range(3):
        add_run(day_of(day), "x", Path(".llenergy/history"))
    assert main(["history", "show", "--format=html", "-o", "page.html"]) == 0
    text = Path("page.html").read_text("utf-8")
    assert "<title>Energy history: 1 test, 0 changed</title>" in text
    assert all(commit(day)[:10] in text for day in range(3))
    assert main(["history", "show", "--format=json", "-o", "view.json"]) == 0
    assert msgspec.json.decode(Path("view.json").read_bytes())["place"] == ".llenergy/history"
