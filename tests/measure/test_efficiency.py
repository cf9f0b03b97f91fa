# SPDX-License-Identifier: Apache-2.0
"""Joules for an operation: the uncertainty is that of the joules, and what is missing stays missing."""

from __future__ import annotations

from pytest_llenergy.measure.metrics import energy_per_flop, flops_metrics
from pytest_llenergy.model.record import Metric
from pytest_llenergy.model.timeline import Flops

ENERGY = Metric(value=8.0, unit="J", uncertainty=0.5, spread=0.25, uncertainty_absolute=1.0, n=6)


def test_energy_is_shared_out_over_the_operations_with_its_uncertainties() -> None:
    metrics = flops_metrics(ENERGY, Flops(count=1 << 20, source="counted"))
    assert metrics["flops"] == Metric(value=1 << 20, unit="FLOP", n=1, source="counted")
    assert metrics["energy_per_flop_j"] == Metric(
        value=8 / 2**20,
        unit="J",
        uncertainty=0.5 / 2**20,
        spread=0.25 / 2**20,
        uncertainty_absolute=1 / 2**20,
        n=6,
        source="counted",
    )


def test_operations_that_cannot_be_told_leave_no_efficiency() -> None:
    metrics = flops_metrics(ENERGY, Flops.unknown("they cannot"))
    assert metrics["flops"] == Metric(value=None, unit="FLOP", n=0, reason="they cannot")
    assert metrics["energy_per_flop_j"] == Metric(value=None, unit="J", reason="they cannot")


def test_energy_that_was_not_measured_leaves_none_and_its_reason() -> None:
    lacking = Metric(value=None, unit="J", reason="no meter")
    metrics = flops_metrics(lacking, Flops(count=10, source="counted"))
    assert metrics["flops"].value == 10
    assert metrics["energy_per_flop_j"] == Metric(value=None, unit="J", reason="no meter", source="counted")


def test_no_operations_are_no_divisor() -> None:
    none = Metric(value=0, unit="FLOP", n=1, source="counted")
    assert energy_per_flop(ENERGY, none).reason == "no floating-point operations were counted"
