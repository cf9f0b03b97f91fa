# SPDX-License-Identifier: Apache-2.0
"""A ``gpus`` mark leases wherever it comes from, also for tests that use no fixture of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from .nvml_sim import Board, World
from .nvml_sim.fixtures import Give

#: Whether somebody holds a device, as another process would see it.
LEASED = """
import fcntl, os, pathlib
from pytest_llenergy.devices.lockfile import lock_name
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
"""

PARAM = """
import pytest
from leases import leased
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.gpus({mark}))])
def test_it(n):
    assert leased("UUID") == bool(n)
"""

CLASS = """
import pytest, unittest
from leases import leased
class TestIt(unittest.TestCase):
    @pytest.mark.gpus({mark})
    def test_it(self):
        assert leased("UUID")
    def test_other(self):
        assert not leased("UUID")
"""

ADDED = """
from leases import leased
def test_it(): assert leased("UUID")
def test_other(): assert not leased("UUID")
"""

ADD = """
import pytest
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[0].add_marker(pytest.mark.gpus({mark}))
"""

ITEM = """
import pytest
from leases import leased
class Item(pytest.Item):
    def runtest(self): assert leased("UUID") == (self.name == "test_it")
class File(pytest.File):
    def collect(self):
        return [Item.from_parent(self, name=name) for name in ("test_it", "test_other")]
def pytest_collect_file(file_path, parent):
    return File.from_parent(parent, path=file_path) if file_path.suffix == ".py" else None
"""

SOURCES = pytest.mark.parametrize(
    ("suite", "conftest"),
    [(PARAM, ""), (CLASS, ""), (ADDED, ADD), ("", ITEM + ADD)],
    ids=["param", "unittest", "add_marker", "no fixtures"],
)


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board()]))


def run(pytester: pytest.Pytester, world: World, suite: str, conftest: str, mark: str) -> pytest.RunResult:
    uuid = world.board(0).uuid
    pytester.makepyfile(leases=LEASED)
    pytester.makeconftest(conftest.replace("{mark}", mark).replace("UUID", uuid))
    pytester.makepyfile(test_it=suite.replace("{mark}", mark).replace("UUID", uuid))
    # A process of its own: a driver library that was loaded once stays.
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", "test_it.py")


@SOURCES
def test_a_mark_leases_its_own_test_and_no_other(
    pytester: pytest.Pytester, world: World, suite: str, conftest: str
) -> None:
    run(pytester, world, suite, conftest, "1").assert_outcomes(passed=2)


@SOURCES
def test_a_shortage_skips_it(pytester: pytest.Pytester, world: World, suite: str, conftest: str) -> None:
    result = run(pytester, world, suite, conftest, "9")
    result.assert_outcomes(passed=1, skipped=1)
    assert "gpus(9): only 1 of 1 GPUs may be used here" in result.stdout.str()


@SOURCES
def test_wrong_arguments_name_test_and_mark(
    pytester: pytest.Pytester, world: World, suite: str, conftest: str
) -> None:
    result = run(pytester, world, suite, conftest, "0")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["PlanError: test_it.py::*: @pytest.mark.gpus: n is 0, needs *"])


def test_a_gate_of_a_parameter_that_would_do_nothing_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize('i', [pytest.param(0, marks=pytest.mark.energy_gate(budget='1 J')), 1])\n"
        "def test_it(i): pass\n"
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["PlanError: *test_it?0?: @pytest.mark.energy_gate judges what energy*"])


def test_what_a_test_sets_does_not_change_what_later_ones_may_have(
    pytester: pytest.Pytester, world: World
) -> None:
    pytester.makepyfile(
        """
        import os, pytest
        def test_sets():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        @pytest.mark.gpus(1)
        def test_later(gpus):
            assert gpus.uuids
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


@pytest.mark.parametrize("selection", ["9", "GPU-zz", "0,0", "0,,1"])
def test_a_mistyped_selection_fails_the_test(pytester: pytest.Pytester, world: World, selection: str) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.gpus(1)\ndef test_it(): pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", f"--energy-gpus={selection}")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["DeviceError: --energy-gpus: '*"])
