# SPDX-License-Identifier: Apache-2.0
"""The picture of a terminal shows a run; the published one comes from the published recording."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from pictures.recording import Recording, record
from pictures.svg import still

from ..conftest import TEN_WATTS
from .pages import ROOT

IMAGES = ROOT / "docs" / "images"


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


def test_the_published_picture_comes_from_the_recording() -> None:
    recording = Recording.read((IMAGES / "terminal.cast").read_text())
    assert (IMAGES / "summary.svg").read_text() == still(recording)
    # The joules must not look measured.
    assert "estimated" in recording.cast()
