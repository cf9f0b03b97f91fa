# SPDX-License-Identifier: Apache-2.0
"""Windows shorter than a tick, without quiet gaps made for them."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.meters.edges import is_short_window
from pytest_llenergy.meters.window_arithmetic import energy_between, require_resolvable

from .watching import Spell, watched
from .waves import EPOCH, MS, S, Sensor, Wave, domain

TICK = 100 * MS


def scores(outside_w: float, inside_w: float, length_ms: int, load_ms: int | None = None) -> list[float]:
    """Errors in units of u of windows over a load (of its own length, or another) in random phase."""
    rng, found = Random(length_ms), []
    for _ in range(150):
        start_ns = EPOCH + rng.randrange(TICK)
        end_ns = start_ns + length_ms * MS
        until_ns = start_ns + (load_ms or length_ms) * MS
        wave = Wave(((EPOCH - 4 * S, outside_w), (start_ns, inside_w), (until_ns, outside_w)))
        spells = [Spell(start_ns, end_ns, at_work=True), Spell(end_ns, end_ns + S, at_work=False)]
        series = watched(
            [Sensor(wave, TICK)], rng, start_ns - 2 * S, end_ns + S, domain(period_s=0.1), spells
        )
        energy = require_resolvable(energy_between(series, start_ns, end_ns), series, length_ms / 1e3)
        if energy.energy_j is not None and energy.u_j is not None:
            found.append(abs(energy.energy_j - wave.joules(start_ns, end_ns)) / energy.u_j)
    return found


@pytest.mark.parametrize("length_ms", [10, 30, 50, 80, 130, 180])
def test_a_load_in_quiet_surroundings_is_found(length_ms: int) -> None:
    found = scores(100, 500, length_ms)
    assert len(found) >= 0.8 * 150
    assert fmean(score <= 2 for score in found) >= 0.95


@pytest.mark.parametrize("length_ms", [30, 80, 130])
def test_a_window_in_steady_load_is_its_share_of_the_time(length_ms: int) -> None:
    found = scores(400, 400, length_ms)
    assert len(found) >= 0.5 * 150
    assert fmean(score <= 2 for score in found) >= 0.95


def test_a_load_that_goes_on_after_the_window_is_not_all_counted_in() -> None:
    """It ends 400 ms later, so that the power after is not that before."""
    found = scores(100, 500, 80, load_ms=480)
    assert len(found) >= 20
    assert fmean(score <= 2 for score in found) >= 0.95


def test_two_ticks_inside_make_a_window_long() -> None:
    wave = Wave(((EPOCH - 4 * S, 100.0), (EPOCH + 9 * S, 100.0)))
    series = watched([Sensor(wave, TICK)], Random(0), EPOCH, EPOCH + 2 * S, domain(period_s=0.1))
    start_ns = EPOCH + 930 * MS
    assert is_short_window(series, start_ns, start_ns + 150 * MS)
    assert not is_short_window(series, start_ns, start_ns + 350 * MS)
