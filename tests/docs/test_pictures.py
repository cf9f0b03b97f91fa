# SPDX-License-Identifier: Apache-2.0
"""Pictures of a terminal show each screen at its time; the published ones come from one run."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from pictures.recording import Recording, record
from pictures.svg import animated, still

from ..conftest import TEN_WATTS
from .pages import ROOT

IMAGES = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"


def lines_at(svg: str, at_s: float, length_s: float) -> dict[str, str]:
    """Return the visible text at a moment, by its height."""
    percent = 100 * at_s / length_s
    style = svg.partition("<style>")[2].partition("</style>")[0]
    keys = dict(re.findall(r"@keyframes (k\d+)\{(.*?\})\}", style))
    seen: dict[str, str] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        steps = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", keys.get(str(group.get("id")), ""))
        state = [state for begin, state in steps if float(begin) <= percent]
        if not state or state[-1] == "visible":
            for text in group.iter(f"{SVG}text"):
                height = str(text.get("y"))
                seen[height] = f"{seen.get(height, '')}{text.text}"
    return seen


def test_each_screen_is_visible_at_its_time_only() -> None:
    recording = Recording("a title", 20, 4)
    recording.add(0.0, "one <\x1b[1;32mgreen\x1b[0m>\r\n")
    recording.add(0.5, "two")
    recording.add(0.5, "\r\x1b[2Kthree")
    length_s, svg = recording.length_s, animated(recording)
    assert list(lines_at(svg, 0.2, length_s).values()) == ["one <green>"]
    assert list(lines_at(svg, 0.7, length_s).values()) == ["one <green>", "two"]
    assert list(lines_at(svg, 1.2, length_s).values()) == ["one <green>", "three"]
    assert '<text x="56.0" y="61.5" fill="#8ddb8c" textLength="42.0" class="b">green</text>' in svg
    assert "script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_long_pauses_are_shortened_and_a_recording_can_be_played() -> None:
    recording = Recording("a title", 20, 4)
    recording.add(0.0, "one")
    recording.add(90.0, "two")
    assert recording.length_s < 10
    assert Recording.read(recording.cast()) == recording


def test_a_recording_shows_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(TEN_WATTS)
    (tmp_path / "test_it.py").write_text("import time\ndef test_it(energy):\n    energy(time.sleep, 0.2)\n")
    quick = "--energy-rounds=2 --energy-warmup=0 --energy-budget=0.1"
    recording = record(f"pytest -p no:cacheprovider {quick}", tmp_path, columns=80, rows=30)
    shown = "".join(ElementTree.fromstring(still(recording)).itertext())
    assert "1 passed" in shown
    assert "ten-watts" in shown
    assert str(tmp_path) not in recording.cast()


def test_the_published_pictures_come_from_one_run() -> None:
    recording = Recording.read((IMAGES / "terminal.cast").read_text())
    assert (IMAGES / "terminal.svg").read_text() == animated(recording)
    assert (IMAGES / "summary.svg").read_text() == still(recording)
    # The joules must not look measured.
    assert "estimated" in recording.cast()
