# SPDX-License-Identifier: Apache-2.0
"""The figures of the documentation show what its pages claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLUGIN = Path(__file__).parents[1] / "benchmarks" / "plugin"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load a drawing script with the modules next to it."""
    path = PLUGIN / name
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_window_picture_is_right_where_two_readings_are_far_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = script("coverage/window_picture.py", monkeypatch)
    shown = drawn.window(drawn.PHASE)
    assert shown.error_of_two_readings < -0.3
    assert abs(shown.energy_j - shown.true_j) < 2 * shown.u_j < 0.02 * shown.true_j
    drawn.main(tmp_path / "window.svg")
    assert "true energy" in (tmp_path / "window.svg").read_text()


def test_the_coverage_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = script("coverage/coverage_picture.py", monkeypatch)
    drawn.main(tmp_path / "coverage.svg", 2)
    assert "within 2u" in (tmp_path / "coverage.svg").read_text()


@pytest.mark.slow
def test_the_verdict_picture_has_a_region_and_an_example_of_each_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = script("gate/gate_picture.py", monkeypatch)
    assert {each.estimate.verdict for each in drawn.simulate_examples()} == set(drawn.COLOURS)
    assert [drawn.estimate_at(shift, 0.005).verdict for shift in (-0.05, -0.02, 0.02, 0.05)] == [
        *("improved", "unchanged", "worse", "regressed")
    ]
    assert drawn.estimate_at(0.03, 0.05).verdict == "inconclusive"
    drawn.main(tmp_path / "verdicts.svg")
    assert "tolerance" in (tmp_path / "verdicts.svg").read_text()
