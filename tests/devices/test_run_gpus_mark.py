# SPDX-License-Identifier: Apache-2.0
"""A ``gpus`` mark leases devices wherever it is set, even for tests that use no fixture of the plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

Run = Callable[..., pytest.RunResult]

#: Functions that check, as another process would, whether a device is leased.
LEASED = """
import fcntl, os, pathlib
from pytest_llenergy.devices.locks import lock_name
def leased(uuid):
    path = pathlib.Path(os.environ["LLENERGY_LOCK_DIR"], lock_name(uuid))
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
def count():
    return sum(map(leased, UUIDS))
"""

SUITE = """
import unittest

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.gpus(1))])
def test_parameter(n):
    assert count() == n

class TestIt(unittest.TestCase):
    @pytest.mark.gpus(1)
    def test_it(self):
        assert count() == 1
    def test_other(self):
        assert count() == 0

def test_added():
    assert count() == 1
"""

#: Adds marks, also to an item that has no fixtures.
CONFTEST = """
import pytest
from leases import count

class Item(pytest.Item):
    def runtest(self): assert count() == (self.name == "test_added")

class File(pytest.File):
    def collect(self):
        return [Item.from_parent(self, name=name) for name in ("test_added", "test_other")]

def pytest_collect_file(file_path, parent):
    return File.from_parent(parent, path=file_path) if file_path.suffix == ".own" else None

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_added":
            item.add_marker(pytest.mark.gpus({n}))
"""


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(), Board(name="NVIDIA L4")]))


@pytest.fixture
def run_on_two(pytester: pytest.Pytester, world: World) -> Run:
    """Run tests that call ``count()``, which returns how many of two boards are leased."""
    uuids = [world.board(index).uuid for index in range(2)]
    (pytester.path / "leases.py").write_text(f"UUIDS = {uuids}\n{LEASED}")

    def call(suite: str, conftest: str = "") -> pytest.RunResult:
        pytester.makeconftest(dedent(conftest))
        header = "import pytest\nfrom leases import count\n"
        pytester.makepyfile(test_it=header + dedent(suite))
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", "--energy-meter=nvml")

    return call


def test_a_mark_leases_for_its_test_only(run_on_two: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_it.own").touch()
    run_on_two(SUITE, CONFTEST.format(n=1)).assert_outcomes(passed=7)


def test_invalid_arguments_name_the_test_and_the_mark(run_on_two: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_it.own").touch()
    result = run_on_two("", CONFTEST.format(n=0))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["test_it.own::*: @pytest.mark.gpus: n is 0, needs *"])


class TestNames:
    """The mark leases even if a parameter or a fixture of the user is called ``gpus``."""

    def test_a_user_fixture_may_be_named_gpus(self, run_on_two: Run) -> None:
        run_on_two(
            """
            pytestmark = pytest.mark.gpus(1)
            @pytest.fixture
            def gpus(): return "mine"
            def test_it(gpus): assert (gpus, count()) == ("mine", 1)
            def test_other(): assert count() == 1
            """
        ).assert_outcomes(passed=2)

    def test_an_indirect_value_for_a_user_fixture_named_gpus_is_passed_on(self, run_on_two: Run) -> None:
        run_on_two(
            """
            @pytest.fixture
            def gpus(request, gpus): return gpus.uuids[: request.param]
            @pytest.mark.gpus(2)
            @pytest.mark.parametrize("gpus", [1, 2], indirect=True)
            def test_it(gpus, request):
                assert (len(gpus), count()) == (request.node.callspec.params["gpus"], 2)
            """
        ).assert_outcomes(passed=2)


class TestSpan:
    """The lease begins before and ends after the function-scoped fixtures of a test."""

    def test_the_lease_spans_function_scoped_fixtures(self, run_on_two: Run) -> None:
        run_on_two(
            """
            @pytest.fixture(autouse=True)
            def everywhere():
                assert count() == 1
                yield
                assert count() == 1
            @pytest.fixture
            def server():
                assert count() == 1
                yield
                assert count() == 1
            def setup_function(): assert count() == 1
            def teardown_function(): assert count() == 1
            @pytest.mark.gpus(1)
            def test_mark(server): assert count() == 1
            @pytest.mark.gpus(1)
            def test_fixture(server, gpus): assert count() == 1
            @pytest.mark.gpus(1)
            def test_measured(server, energy_meter):
                with energy_meter("w"): assert count() == 1
            """
        ).assert_outcomes(passed=3)
