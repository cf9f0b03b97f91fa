# SPDX-License-Identifier: Apache-2.0
"""What travels by value: all that users' own modules define, however it is wrapped, and nothing installed."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.workers.workload import pickle_call

from .no_torch import without_torch

#: What only a module that is imported by name can have.
WITH_LOCK = """
import threading
LOCK = threading.Lock()
def locked(number):
    with LOCK:
        return number
"""

WRAPPED = """
import functools
import operator
from dataclasses import dataclass
from typing import NamedTuple

FACTOR = 3

def times(x, y=1):
    return FACTOR * x * y

@functools.lru_cache(maxsize=7)
def cached(x):
    return times(x)

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@dataclass
class Point:
    x: int
    def times(self, y):
        return times(self.x, y)
    def __call__(self, y):
        return self.times(y)

class Pair(NamedTuple):
    left: int
    right: int

def test_partial(workers):
    assert workers.run(functools.partial(functools.partial(times, 2), y=5)) == [30]
def test_cached(workers):
    assert workers.run(cached, 2) == [6]
    assert workers.run(lambda: (cached(2), cached(2), cached.cache_info()))[0][2][:3] == (1, 1, 7)
def test_wrapped(workers):
    assert workers.run(logged(cached), 2) == [6]
def test_function_in_arguments(workers):
    assert workers.run(functools.reduce, times, [1, 2, 3]) == [54]
    assert workers.run(sorted, [2, 1], key=times) == [[1, 2]]
    assert workers.run(list, [{"nested": (Point(1),)}]) == [[{"nested": (Point(1),)}]]
    assert workers.run(sum, Pair(1, 2)) == [3]
def test_methods(workers):
    assert workers.run(Point(2).times, 5) == [30]
    assert workers.run(Point(2), 5) == [30]
    assert workers.run(operator.methodcaller("times", 5), Point(2)) == [30]
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_of_the_test_file_travel_however_they_are_wrapped(
    pytester: pytest.Pytester, mode: str
) -> None:
    (pytester.mkdir("deeper") / "test_wrapped.py").write_text(WRAPPED)
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--import-mode={mode}")
    result.assert_outcomes(passed=5)


@pytest.mark.parametrize(
    "place", ["usr/lib/python3/dist-packages", "home/.local/lib/python3/site-packages", "of_a_user"]
)
def test_what_is_installed_anywhere_travels_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    name = f"with_lock_{len(place)}"
    (directory / f"{name}.py").write_text(WITH_LOCK)
    monkeypatch.syspath_prepend(directory)
    module = importlib.import_module(name)
    if place == "of_a_user":
        with pytest.raises(WorkerError, match="locked and its arguments cannot be sent to the ranks"):
            pickle_call(module.locked, (1,), {})
    else:
        assert pickle.loads(pickle_call(module.locked, (1,), {}))[0] is module.locked


def test_an_instance_whose_type_a_rank_can_import_keeps_that_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_type.py").write_text(f"{WITH_LOCK}\nclass Locked:\n    held = LOCK\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("with_type")
    _, (instance,), _ = pickle.loads(pickle_call(id, (module.Locked(),), {}))
    assert type(instance) is module.Locked


def is_registered() -> bool:
    return __name__ in cloudpickle.list_registry_pickle_by_value()


def test_what_a_test_has_registered_by_itself_stays_registered() -> None:
    pickle_call(is_registered, (), {})
    assert not is_registered()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        pickle_call(is_registered, (), {})
        assert is_registered()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
