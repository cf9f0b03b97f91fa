# SPDX-License-Identifier: Apache-2.0
"""Which products have a power sensor that looks only part of the time."""

from __future__ import annotations

import pytest

from pytest_llenergy.meters.nvml import averaging_time_s, sensor_coverage


@pytest.mark.parametrize(
    ("product", "share"),
    [
        ("NVIDIA A100-SXM4-80GB", 0.25),
        ("A100-PCIE-40GB", 0.25),
        ("NVIDIA A800-SXM4-80GB", 0.25),
        ("NVIDIA A30", 0.25),
        ("NVIDIA H100 80GB HBM3", 0.25),
        ("NVIDIA H800", 0.25),
        ("NVIDIA H200 NVL", 0.25),
        ("NVIDIA GH200 480GB", 0.25),
        ("Tesla P100-PCIE-16GB", 0.5),
        ("Tesla V100-SXM2-32GB", 0.5),
        ("Quadro RTX 8000", 0.2),
        ("NVIDIA RTX A1000", 1.0),
        ("NVIDIA A10", 1.0),
        ("NVIDIA A30000", 1.0),
        ("NVIDIA GeForce RTX 4090", 1.0),
        ("NVIDIA GeForce RTX 2080 Ti", 1.0),
        ("NVIDIA B200", 1.0),
    ],
)
def test_the_product_tells_the_coverage(product: str, share: float) -> None:
    assert sensor_coverage(product)[0] == pytest.approx(share)


def test_slow_ticks_are_seen_less_and_fast_ones_not_more() -> None:
    assert sensor_coverage("NVIDIA H100 PCIe", 0.125)[0] == pytest.approx(0.2)
    assert sensor_coverage("NVIDIA H100 PCIe", 0.01)[0] == pytest.approx(0.25)
    assert sensor_coverage("NVIDIA L4", 10.0)[0] == 1.0


def test_the_source_says_what_was_measured_and_what_assumed() -> None:
    measured = "the power sensor looks for 25 ms of each 100 ms (Yang, Adamek, Armour, SC 2024)"
    assert sensor_coverage("NVIDIA H100 PCIe")[1] == measured
    assert "as on the H100, of the same die" in sensor_coverage("NVIDIA H200")[1]
    assert sensor_coverage("NVIDIA L4")[1] == "no blind time of the power sensor is known"


@pytest.mark.parametrize(
    ("product", "architecture", "seconds"),
    [
        ("NVIDIA A100-SXM4-80GB", 7, 0.0),
        ("Tesla V100-SXM2-16GB", 5, 0.0),
        ("NVIDIA A10", 7, 1.0),
        ("NVIDIA H100 PCIe", 9, 1.0),
        ("NVIDIA L4", None, 1.0),
    ],
)
def test_boards_since_ampere_average_but_for_ga100(
    product: str, architecture: int | None, seconds: float
) -> None:
    assert averaging_time_s(product, architecture) == seconds
