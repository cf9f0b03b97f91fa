# SPDX-License-Identifier: Apache-2.0
"""Every format that reports can be exported in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_llenergy.export.sides import Side

#: Named after those who read them.
Target = Literal["pytest-benchmark", "github-action-benchmark", "bencher", "openmetrics", "csv"]

TARGETS: tuple[Target, ...] = ("pytest-benchmark", "github-action-benchmark", "bencher", "openmetrics", "csv")

#: Those in which both sides of a paired file have a place.
WITH_SIDES: frozenset[Target] = frozenset({"openmetrics", "csv"})


def export(sides: Sequence[Side], target: Target) -> str:
    """The text of the file. Formats without a place for sides take one."""
    if target == "openmetrics":
        from pytest_llenergy.export.openmetrics import openmetrics

        return openmetrics(sides)
    if target == "csv":
        from pytest_llenergy.export.table import table

        return table(sides)
    (side,) = sides
    if target == "pytest-benchmark":
        from pytest_llenergy.export.pytest_benchmark import pytest_benchmark

        return pytest_benchmark(side)
    if target == "bencher":
        from pytest_llenergy.export.bencher import bencher

        return bencher(side)
    from pytest_llenergy.export.action import smaller_is_better

    return smaller_is_better(side)
