# SPDX-License-Identifier: Apache-2.0
"""Change points and outlier sessions of simulated series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from math import log
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.compare.history.change_points import (
    MIN_SEGMENT,
    PENALTY,
    _long_run_variance,
    _partition,
    find_change_points,
    find_outliers,
    step_sizes,
)


def series(random: Random, noise: float, *parts: tuple[int, float]) -> list[float]:
    return [level * random.gauss(1.0, noise) for count, level in parts for _ in range(count)]


def with_outliers(random: Random, count: int) -> list[float]:
    """Three sessions in a hundred need much more."""
    disturbed = [random.random() < 0.03 for _ in range(count)]
    return [random.gauss(1.0, 0.01) * (1 + random.expovariate(5) * each) for each in disturbed]


def correlated(random: Random, count: int) -> list[float]:
    """Half of the deviation carries over to the next session."""
    deviation, found = 0.0, []
    for _ in range(count):
        deviation = 0.5 * deviation + random.gauss(0.0, 0.01 * 0.75**0.5)
        found.append(1.0 + deviation)
    return found


def test_noise_is_not_a_change() -> None:
    random = Random(1)
    found = [series(random, 0.01, (length, 10.0)) for length in (8, 12, 20, 60) for _ in range(50)]
    assert sum(bool(find_change_points(each)) for each in found) <= 2


@pytest.mark.parametrize(("world", "most"), [(with_outliers, 2), (correlated, 4)])
def test_disturbances_are_not_changes(world: Callable[[Random, int], list[float]], most: int) -> None:
    random = Random(2)
    assert sum(len(find_change_points(world(random, 60))) for _ in range(100)) <= most
    assert sum(len(find_change_points(world(random, 500))) for _ in range(10)) == 0


@pytest.mark.parametrize("world", [with_outliers, correlated])
def test_step_among_disturbances_is_found(world: Callable[[Random, int], list[float]]) -> None:
    random, found = Random(3), 0
    for _ in range(50):
        values = world(random, 60)
        places = find_change_points([*values[:25], *(value * 1.04 for value in values[25:])])
        found += any(abs(place - 25) <= 3 for place in places)
    assert found >= 48


@pytest.mark.parametrize("length", [60, 200])
def test_step_of_four_percent_is_located(length: int) -> None:
    random, found = Random(4), 0
    for _ in range(100):
        place = random.randrange(length // 4, length * 3 // 4)
        places = find_change_points(series(random, 0.01, (place, 10.0), (length - place, 10.4)))
        found += len(places) == 1 and abs(places[0] - place) <= 2
    assert found >= 98


def test_single_outlier_is_marked_and_not_a_change() -> None:
    values = series(Random(3), 0.005, (15, 10.0), (1, 14.0), (15, 10.0))
    assert find_change_points(values) == []
    assert find_outliers(values) == [15]


def test_last_three_sessions_are_a_change_but_two_are_not() -> None:
    values = series(Random(8), 0.01, (60, 10.0))
    assert find_change_points([*values, 12.0, 12.1]) == []
    assert find_change_points([*values, 12.0, 10.0, 12.1]) == []
    assert find_change_points([*values, 12.0, 12.1, 12.0]) == [60]


def test_two_steps_are_located_with_their_sizes() -> None:
    values = [10.0] * 6 + [11.0] * 6 + [8.8] * 6
    assert find_change_points(values) == [6, 12]
    assert step_sizes(values, [6, 12]) == pytest.approx([0.1, -0.2])
    assert find_outliers(values) == []


def test_many_steps_are_located() -> None:
    """Large steps do not count as scatter."""
    found = 0
    random = Random(9)
    for _ in range(20):
        values = series(random, 0.01, *[(8, level) for level in (1.0, 1.2, 1.0, 1.3, 1.05, 1.25, 1.0, 1.2)])
        found += find_change_points(values) == [8, 16, 24, 32, 40, 48, 56]
    assert found >= 19


@pytest.mark.parametrize("values", [[1.0, 2.0] * 3, [10.0] * 10 + [10.1] * 10, [-1.0] * 5 + [5.0] * 5])
def test_too_few_or_negative_values_and_small_steps_show_no_change(values: list[float]) -> None:
    assert find_change_points(values) == []


def test_long_run_variance_of_correlated_sessions_is_larger_and_ignores_steps() -> None:
    random = Random(5)
    plain = [log(each) for each in series(random, 0.01, (4000, 1.0))]
    assert _long_run_variance(plain) == pytest.approx(1e-4, rel=0.2)
    assert _long_run_variance([each + 0.5 * (place > 999) for place, each in enumerate(plain)]) < 1.3e-4
    # Three times the variance of one session for a correlation of 0.5.
    assert _long_run_variance([log(each) for each in correlated(random, 4000)]) == pytest.approx(
        3e-4, rel=0.25
    )


def partitions(count: int) -> Iterator[list[int]]:
    for size in range(count // MIN_SEGMENT):
        for places in combinations(range(count), size):
            if all(end - start >= MIN_SEGMENT for start, end in pairwise([0, *places, count])):
                yield list(places)


def total_cost(logs: Sequence[float], places: list[int], penalty: float) -> float:
    segments = [logs[start:end] for start, end in pairwise([0, *places, len(logs)])]
    return penalty * len(places) + sum((x - fmean(each)) ** 2 for each in segments for x in each)


def test_partition_is_the_best_of_all() -> None:
    random, seen = Random(6), set()
    for penalty in (0.5, 2.0, 8.0):
        for _ in range(10):
            logs = [random.gauss(random.choice([0, 2]) * (place > 6), 1.0) for place in range(14)]
            best = min(partitions(14), key=lambda places: total_cost(logs, places, penalty))
            assert _partition(logs, penalty) == best
            seen.add(len(best))
    assert len(seen) >= 3


def test_partition_agrees_with_ruptures() -> None:
    numpy = pytest.importorskip("numpy")
    ruptures = pytest.importorskip("ruptures")
    random = Random(7)
    for steps in range(6):
        parts = [(random.randrange(5, 60), random.choice([1.0, 1.03, 0.95])) for _ in range(1 + steps)]
        logs = [log(each) for each in series(random, 0.01, *parts)]
        penalty = PENALTY * 1e-4 * log(len(logs))
        search = ruptures.KernelCPD(kernel="linear", min_size=MIN_SEGMENT)
        expected = search.fit(numpy.array(logs).reshape(-1, 1)).predict(pen=penalty)[:-1]
        assert _partition(logs, penalty) == expected


def test_values_that_are_not_positive_are_left_out() -> None:
    values = [1.0, 1.001, 0.999] * 4 + [1.2, 1.201, 1.199] * 4
    values[3], values[20] = 0.0, -1.0
    assert find_change_points(values) == [12]
    assert step_sizes(values, [12]) == pytest.approx([0.2], abs=0.01)
    assert find_outliers(values) == [3, 20]
    assert find_change_points([0.0] * 20) == []
    assert step_sizes([5e-324] * 4 + [1e30] * 4, [4])[0] > 1e300
