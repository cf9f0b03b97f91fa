# SPDX-License-Identifier: Apache-2.0
"""MFU: known peaks by board and data type, and the reason where none is known."""

from __future__ import annotations

import pytest

from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.peak_flops import parse_peak, peak_flops, utilization
from pytest_llenergy.record.record import Metric

FLOPS = Metric(value=4e14, unit="FLOP", n=1)
DURATION = Metric(value=2.0, unit="s", uncertainty=0.1, spread=0.1, uncertainty_absolute=0.2, n=6)


def board(name: str, uuid: str = "GPU-1") -> Board:
    return Board(uuid=uuid, name=name, pci_bus_id="0")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "float16", 756.5),
        ("NVIDIA H200", "float32", 67.0),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L40", "bfloat16", 181.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("Tesla T4", "float16", 65.0),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "Q4_1", None),
        ("NVIDIA H100 80GB HBM3", None, None),
    ],
)
def test_peaks_are_those_of_dense_matrices(name: str, dtype: str | None, tflops: float | None) -> None:
    peak, source = peak_flops([board(name)], dtype)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))
    if tflops is None:
        known = dtype or "an unknown dtype"
        assert source == f"the peak of {name} with {known} is unknown; --energy-peak-flops gives it"


def test_the_peaks_of_several_boards_add_up() -> None:
    peak, source = peak_flops([board("NVIDIA L4"), board("NVIDIA L4", "GPU-2")], "bfloat16")
    assert peak == pytest.approx(242e12)
    assert source == "242 TFLOP/s, bfloat16, dense (data sheet)"
    assert peak_flops([board("NVIDIA H200", "MIG-1")], "bfloat16")[0] is None


def test_utilization_has_the_relative_uncertainty_of_the_duration() -> None:
    found = utilization(FLOPS, DURATION, 2, 200e12, (None, "unknown"))
    assert found.value == pytest.approx(0.5)
    assert (found.uncertainty, found.uncertainty_absolute) == pytest.approx((0.025, 0.05))
    assert (found.unit, found.source) == ("1", "2e+14 FLOP/s a device (--energy-peak-flops)")
    known = utilization(FLOPS, DURATION, 2, None, (800e12, "the sheet"))
    assert known.value == pytest.approx(0.25)
    assert known.source == "the sheet"


def test_a_missing_part_gives_its_reason() -> None:
    nothing = Metric(value=None, unit="FLOP", reason="not counted")
    assert utilization(nothing, DURATION, 1, 1e12, (None, "")).reason == "not counted"
    assert utilization(FLOPS, DURATION, 1, None, (None, "no peak")).reason == "no peak"
    assert utilization(FLOPS, DURATION, 1, None, peak_flops([], "float32")).reason == (
        "the peak of this CPU is unknown; --energy-peak-flops gives it"
    )


@pytest.mark.parametrize(
    ("text", "flops"), [("989T", 989e12), ("989 TFLOP/s", 989e12), ("1.5e12", 1.5e12), ("2pflops", 2e15)]
)
def test_a_peak_is_a_number_of_flops(text: str, flops: float) -> None:
    assert parse_peak(text) == pytest.approx(flops)


@pytest.mark.parametrize("text", ["", "0", "-1T", "fast", "1.2.3T", "989T tokens", "1e999"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs the peak of one device in FLOP/s, such as 989T"):
        parse_peak(text)
