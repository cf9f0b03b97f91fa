# SPDX-License-Identifier: Apache-2.0
"""Noise parameters are recovered from rounds simulated with known ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from validation import refit

refit.add_gate_to_path()

from gate_world import Machine, draw_rounds  # noqa: E402

CALM = Machine(0.01, memory=0.0, outliers=0.0, ramp=0.0, ramp_sd=0.0, offset=0.0)


def in_time(machine: Machine, pairs: int, seed: int) -> list[float]:
    """Return rounds in the order of time (ABBA), as the part ``accuracy`` stores them."""
    base, head = draw_rounds(machine, (pairs,), "abba", Random(seed))
    return [
        value
        for place, (one, other) in enumerate(zip(base.values, head.values, strict=True))
        for value in ((other, one) if place % 2 else (one, other))
    ]


def test_noise_memory_and_outliers_are_recovered() -> None:
    world = refit.fit_machine(in_time(CALM, 300, 1))
    assert world.noise == pytest.approx(0.01, rel=0.15)
    assert world.memory == pytest.approx(0.0, abs=0.15)
    assert world.outliers < 0.01
    world = refit.fit_machine(in_time(replace(CALM, memory=0.6), 300, 1))
    assert world.memory == pytest.approx(0.6, abs=0.15)
    world = refit.fit_machine(in_time(replace(CALM, outliers=0.1, outlier_size=10.0), 300, 1))
    # Outliers below three standard deviations cannot be distinguished from the rest.
    assert world.outliers == pytest.approx(0.06, abs=0.025)
    assert world.noise == pytest.approx(0.01, rel=0.25)


def test_ramp_is_not_counted_as_noise() -> None:
    world = refit.fit_machine(in_time(replace(CALM, noise=0.002, ramp=0.05, ramp_rounds=60.0), 24, 1))
    assert world.ramp > 0.01
    assert world.noise < 0.004


def test_rounds_without_noise_can_be_fitted() -> None:
    world = refit.fit_machine([2.0] * 24)
    assert world.noise == refit.MIN_NOISE
    assert world.outliers == 0


def test_gate_is_simulated_with_fitted_noise() -> None:
    cell = refit.simulate_gate(replace(CALM, noise=0.005), suites=1)
    columns, rows = refit.result_rows(cell)
    ours = {str(row[0]): dict(zip(columns, row, strict=True)) for row in rows}["ours, 6+6"]
    assert ours["benchmarks"] == 50
    assert ours["alarms"] == 0
    assert ours["found +10 %"] == 100
