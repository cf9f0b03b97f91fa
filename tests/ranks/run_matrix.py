# SPDX-License-Identifier: Apache-2.0
"""Parametrize runs of pytest by their number of ranks, start method and pytest-xdist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import pytest

from pytest_llenergy.ranks.start_method import StartMethod

from .groups import METHODS


@dataclass(frozen=True)
class Where:
    """How many ranks a run of pytest has, how they start, and whether it uses pytest-xdist."""

    n: int
    method: StartMethod
    xdist: bool

    def arguments(self) -> tuple[str, ...]:
        """Return the options of the command line."""
        options = ("-p", "no:cacheprovider", f"--energy-start-method={self.method}")
        return (*options, "-n2") if self.xdist else options

    @property
    def name(self) -> str:
        return f"{self.n}-{self.method}-{'n2' if self.xdist else 'alone'}"


FORKED, SPAWNED = Where(2, "forkserver", xdist=False), Where(2, "spawn", xdist=False)

MATRIX = [Where(n, method, xdist) for n in (1, 4) for method in METHODS for xdist in (False, True)]


def everywhere(*quick: Where, name: str = "", values: Sequence[object] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by ``where`` and the values of ``name``.

    In the default run each value has one row, which takes turns with the start methods in ``quick``; without
    values each of ``quick`` is a row. All other combinations are slow.
    """
    if not values:
        slow = [each for each in MATRIX if each not in quick]
        rows = [pytest.param(each, id=each.name) for each in quick]
        rows += [pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in slow]
        return pytest.mark.parametrize("where", rows)
    rows = [
        pytest.param(value, each, id=f"{value}-{each.name}")
        for value, each in zip(values, cycle(quick), strict=False)
    ]
    rows += [
        pytest.param(value, each, id=f"{value}-{each.name}", marks=pytest.mark.slow)
        for value in values
        for each in MATRIX
    ]
    return pytest.mark.parametrize((name, "where"), rows)
