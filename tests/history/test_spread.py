# SPDX-License-Identifier: Apache-2.0
"""The spread between sessions, against the values it was simulated with."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, pi, sqrt
from pathlib import Path
from random import Random

import pytest

from pytest_llenergy.history.add import accept_step, add_run
from pytest_llenergy.history.spread import pooled_spread, session_spread, session_spreads
from pytest_llenergy.history.store import Acceptance, LocalStore, read_entries

from ..compare.runs import record_of, scaled
from .sessions import commit, series_of, session


def spread_of(values: Sequence[float], noise: float | None = None) -> float:
    found = session_spread(series_of(values, noise))
    assert found is not None
    return found


def drawn(random: Random, count: int, spread: float) -> list[float]:
    return [exp(random.gauss(0.0, spread)) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.003, 0.01, 0.05])
def test_spread_is_that_of_the_simulation(spread: float) -> None:
    assert spread_of(drawn(Random(1), 400, spread)) == pytest.approx(spread, rel=0.1)


def test_few_sessions_are_right_on_average() -> None:
    random = Random(2)
    squares = [spread_of(drawn(random, 6, 0.01)) ** 2 for _ in range(500)]
    # Rather too large than too small.
    assert 0.01 <= sqrt(sum(squares) / 500) <= 0.0125


def test_changes_and_outliers_do_not_count() -> None:
    values = drawn(Random(3), 200, 0.01)
    values[20::30] = [2.0] * len(values[20::30])
    stepped = [value * (1.0, 1.1, 0.8, 1.3)[place // 50] for place, value in enumerate(values)]
    assert spread_of(stepped) == pytest.approx(0.01, rel=0.15)


def test_noise_of_rounds_is_subtracted() -> None:
    noise = 0.02
    total = sqrt(0.01**2 + pi / 2 * noise**2 / 8)
    assert spread_of(drawn(Random(4), 400, total), noise) == pytest.approx(0.01, rel=0.1)
    assert spread_of([1.0, 1.001, 0.999, 1.0], noise) == 0.0


@pytest.mark.parametrize("values", [[], [1.0, 1.1, 0.9], [1.0, 1.0, 1.0, -1.0]])
def test_too_few_or_negative_sessions_have_no_spread(values: list[float]) -> None:
    assert session_spread(series_of(values)) is None


def test_an_accepted_step_does_not_count_in_a_short_series() -> None:
    step = Acceptance(schema_version=1, commit=commit(3), tests=["t.py::t"], reason="x", time="2026")
    values = [1.0, 1.01, 1.0, 1.5, 1.5, 1.51]
    assert spread_of(values) > 0.2
    found = session_spread(series_of(values), [step])
    assert found is not None
    assert found < 0.02


def test_spreads_of_a_history_are_by_test(tmp_path: Path) -> None:
    store, random = LocalStore(tmp_path), Random(5)
    for day in range(30):
        records = [record_of("t.py::a", scaled(exp(random.gauss(0, 0.02))))]
        records += [record_of("t.py::b", scaled(exp(random.gauss(0, 0.04) + 0.7 * (day > 14))))]
        records += [record_of("t.py::new", scaled(1.0))] * (day > 27)
        add_run(session(day, *records), "x", store)
    key = read_entries(store)[0].device_key
    spreads = session_spreads(store, metric="energy_j", device_key=key)
    assert spreads == {"t.py::a": pytest.approx(0.02, rel=0.3), "t.py::b": pytest.approx(0.04, rel=0.3)}
    assert pooled_spread(spreads) == pytest.approx(0.03, rel=0.3)
    accept_step(store, commit(15), "larger model", ["b"])
    assert session_spreads(store, metric="energy_j", device_key=key) == spreads
    assert session_spreads(store, metric="energy_j", device_key="0" * 12) == {}
    assert pooled_spread({}) is None
