# SPDX-License-Identifier: Apache-2.0
"""What a test can ask for, and how memory is written and read."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llenergy.devices.request import GpuRequest, format_memory, parse_memory
from pytest_llenergy.errors import PlanError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40 GB", (40 * 10**9, "GB")),
        (" 0.5 tb ", (5 * 10**11, "TB")),
        ("1.5gib", (3 * 2**29, "GiB")),
    ],
)
def test_memory_is_a_number_and_a_unit(text: str, expected: tuple[int, str]) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "text", ["40", "GB", "40 G", "40 kB", "-1 GB", "0 GB", "4,5 GB", "", "40 GB each", 40, "9" * 400 + " GB"]
)
def test_any_other_memory_is_refused_with_what_it_needs(text: Any) -> None:
    with pytest.raises(PlanError) as caught:
        GpuRequest(memory=text)
    assert str(caught.value) == (
        f'memory is {text!r}, needs a number above 0 and a unit, such as "40 GB" or "40 GiB" '
        "(units: MB, GB, TB, MiB, GiB, TiB)"
    )


def test_a_request_is_shown_as_it_is_written() -> None:
    assert str(GpuRequest(2)) == "gpus(2)"
    full = GpuRequest(1, name="H200", fallback="cpu", memory="40 GB")
    assert str(full) == "gpus(1, name='H200', memory='40 GB')"


@pytest.mark.parametrize(
    ("memory_bytes", "unit", "text"),
    [
        (81559 * 2**20, "GiB", "79.6 GiB"),
        (81559 * 2**20, "GB", "85.5 GB"),
        (24 * 10**9, "GB", "24 GB"),
        (80 * 10**9 - 1, "GB", "79.9 GB"),
        (50 * 2**20, "GiB", "50 MiB"),
        (2**30 - 1, "GiB", "1023.9 MiB"),
        (2**30, "GiB", "1 GiB"),
        (0, "GB", "0 MB"),
        (0, "MiB", "0 MiB"),
        (None, "GB", "unknown memory"),
    ],
)
def test_shown_memory_never_looks_like_more(memory_bytes: int | None, unit: str, text: str) -> None:
    assert format_memory(memory_bytes, unit) == text
