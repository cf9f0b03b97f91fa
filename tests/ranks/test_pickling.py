# SPDX-License-Identifier: Apache-2.0
"""What is pickled by value: definitions of test files and of helpers that ranks cannot import."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.ranks.pickling import dump_call

from .no_torch import without_torch

#: A module that cannot be pickled by value.
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
def test_wrapped(workers):
    assert workers.run(logged(times), 2) == [6]
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

#: A module beside the test file, in a package that is not on the search path.
BESIDE = """
FACTOR = 3
class Point:
    x = 2
def times(x, y):
    return FACTOR * x * y
"""

USES_BESIDE = """
from . import beside
from .beside import Point, times
def test_function(workers):
    assert workers.run(lambda: times(Point.x, 5)) == [30]
def test_module(workers):
    assert workers.run(lambda: beside.times(beside.Point.x, 5)) == [30]
def test_type(workers):
    assert type(workers.run(lambda: Point())[0]) is Point
"""


@pytest.mark.slow
def test_functions_of_a_test_file_are_pickled_by_value_however_wrapped(pytester: pytest.Pytester) -> None:
    (pytester.mkdir("deeper") / "test_wrapped.py").write_text(WRAPPED)
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=4)


def test_helpers_beside_a_test_file_are_pickled_by_value_if_ranks_cannot_import_them(
    pytester: pytest.Pytester,
) -> None:
    package = pytester.mkdir("root") / "checks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text(BESIDE)
    (package / "test_uses.py").write_text(USES_BESIDE)
    without_torch(pytester.path)
    arguments = ("-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=root", "root")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=3)


@pytest.mark.parametrize(
    "place", ["usr/lib/python3/dist-packages", "home/.local/lib/python3/site-packages", "of_a_user"]
)
def test_installed_packages_are_pickled_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    name = f"with_lock_{len(place)}"
    (directory / f"{name}.py").write_text(WITH_LOCK)
    monkeypatch.syspath_prepend(directory)
    module = importlib.import_module(name)
    if place == "of_a_user":
        with pytest.raises(TypeError, match="cannot pickle"):
            dump_call(module.locked, (1,), {})
    else:
        assert pickle.loads(dump_call(module.locked, (1,), {}))[0] is module.locked


def test_helpers_that_another_host_lacks_are_pickled_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("SIZE = 3\ndef size():\n    return SIZE\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = importlib.import_module("only_here")

    def call() -> Any:
        return only_here.size()

    by_value, by_name = (dump_call(call, (), {}, elsewhere=each) for each in (True, False))
    monkeypatch.delitem(sys.modules, "only_here")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    function, args, kwargs = pickle.loads(by_value)
    assert function(*args, **kwargs) == 3
    with pytest.raises(ModuleNotFoundError, match="only_here"):
        pickle.loads(by_name)
