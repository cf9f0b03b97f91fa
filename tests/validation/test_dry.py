# SPDX-License-Identifier: Apache-2.0
"""Parts that need a board but not CUDA, run on the stand-in, whose power is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from validation.results import Part
from validation.stand_in import BUSY_W, STEP_S

from .conftest import ROOT

PARTS = ("sensor", "accuracy", "generation")

#: The parts take half a minute together.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Part]:
    """Run the parts concurrently, since they mostly sleep."""
    directory = tmp_path_factory.mktemp("dry")
    given = {**os.environ, "PYTHONPATH": str(ROOT), "LLENERGY_LOCK_DIR": str(directory)}
    command = [
        sys.executable,
        "-m",
        "benchmarks.validation.{}",
        "--dry",
        "--out",
        str(directory),
        "--budget",
        "120",
    ]
    runs = {
        name: subprocess.Popen(
            [part.format(name) for part in command],
            env=given,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in PARTS
    }
    outputs = {name: each.communicate(timeout=180)[0] for name, each in runs.items()}

    def read(name: str) -> Part:
        file = Path(directory / f"{name}.json")
        assert file.exists(), outputs[name]
        part = msgspec.json.decode(file.read_bytes(), type=Part)
        # Checks may fail on a busy machine; errors may not occur.
        assert part.reason is None or part.reason.startswith("checks failed: "), outputs[name]
        assert part.dry
        return part

    return read


def test_sensor_properties_of_the_stand_in_are_measured(done: Callable[[str], Part]) -> None:
    part = done("sensor")
    assert part.data["timing"]["energy counter"]["period_s"] == pytest.approx(0.1, rel=0.01)
    model = part.data["models"]["energy counter"]
    assert model["window_s"] == pytest.approx(0.1, rel=0.15)
    assert model["coverage"] > 0.85
    titles = [table.title for table in part.tables]
    assert "Ticks" in titles
    assert "Averaging window of the sensor, from square waves" in titles
    (agreement,) = [table for table in part.tables if table.title.startswith("Energy counter over")]
    ratios = {str(row[0]): row[3] for row in agreement.rows}
    assert ratios["idle"] == pytest.approx(1.0, abs=0.02)
    assert len(part.figures) == 2


def test_joules_of_a_step_are_those_of_the_stand_in(done: Callable[[str], Part]) -> None:
    part = done("accuracy")
    windows = part.data["windows"]
    assert [one["seconds"] for one in windows] == pytest.approx([0.05, 0.5], rel=0.5)
    short, long = (one["mean_j"] / (BUSY_W * STEP_S) for one in windows)
    assert long == pytest.approx(1.0, abs=0.05)
    # On a busy machine the end of short work is detected late.
    assert 0.95 < short < 1.5
    assert len(part.data["abba_j"]) == 12
    assert any(check.name == "no alarm when nothing changed" for check in part.checks)
    assert part.tables[-1].title == "The gate, simulated with the noise of this board"


def test_other_tools_measure_the_same_windows(done: Callable[[str], Part]) -> None:
    (table,) = done("generation").tables
    per_token = {str(row[2]): row[4] for row in table.rows}
    assert per_token["pytest-llenergy, window"] == pytest.approx(BUSY_W * STEP_S, rel=0.1)
    assert "power every 100 ms" in per_token
