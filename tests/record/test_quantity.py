# SPDX-License-Identifier: Apache-2.0
"""Numbers with units for people."""

from __future__ import annotations

import pytest

from pytest_llenergy.record.quantity import format_energy, format_pair, format_quantity


@pytest.mark.parametrize(
    ("value", "u", "unit", "text"),
    [
        (0.0, None, "J", "0 J"),
        (4.1e-6, None, "J", "4.1 µJ"),
        (0.0123, 0.0004, "J", "12.30 ± 0.40 mJ"),
        (0.00399, 0.037, "J", "4 ± 37 mJ"),
        (7.5, 4.3, "J", "7.5 ± 4.3 J"),
        (0.99996, None, "J", "1 J"),
        (1000.0, None, "J", "1 kJ"),
        (83500.9, 120.0, "J", "83.50 ± 0.12 kJ"),
        (5e9, None, "J", "5e+06 kJ"),
        (-0.2, 0.3, "J", "-200 ± 300 mJ"),
        (0.23, 0.13, "J/token", "230 ± 130 mJ/token"),
        (2.5e-11, 1e-12, "J", "25.0 ± 1.0 pJ"),
        (0.00025, None, "s", "0.00025 s"),
        (1234.0, None, "token/s", "1234 token/s"),
        (float("inf"), None, "J", "inf J"),
    ],
)
def test_joules_have_si_steps_and_other_units_do_not(
    value: float, u: float | None, unit: str, text: str
) -> None:
    assert format_quantity(value, u, unit) == text


def test_energies_without_uncertainty_have_three_digits() -> None:
    assert [format_energy(each) for each in (4.123, 0.23)] == ["4.12 J", "230 mJ"]


@pytest.mark.parametrize(
    ("base", "head", "pair"),
    [
        (0.9, 1.1, ("0.9", "1.1 J")),
        (0.0012, 0.0015, ("1.2", "1.5 mJ")),
        (None, 2500.0, ("-", "2.5 kJ")),
        (3.0, None, ("3", "-")),
        (None, None, ("-", "-")),
    ],
)
def test_two_values_share_a_step(base: float | None, head: float | None, pair: tuple[str, str]) -> None:
    assert format_pair(base, head, "J") == pair
