# SPDX-License-Identifier: Apache-2.0
"""Workers of pytest-xdist receive tests whose boards will be free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..nvml_sim import Board, World

pytest.importorskip("xdist")
pytestmark = pytest.mark.usefixtures("few_plugins")

#: Wide and narrow tests in turn. A wide and a narrow one fit on the boards together, two wide ones do not.
SUITE = """
import glob, json, os, time
import pytest

def go_on(is_wide): pass

def log(name, gpus):
    go_on(len(gpus.uuids) > 1)
    with open("log.jsonl", "a") as file:
        print(json.dumps([os.environ["PYTEST_XDIST_WORKER"], name, len(gpus.uuids)]), file=file)

WIDTHS = [4, 3, 1, 3, 1, 3, 1]
BOARDS = [pytest.param(n, marks=pytest.mark.gpus(n)) for n in WIDTHS]

@pytest.mark.parametrize("n", BOARDS)
def test_it(n, gpus): log("it", gpus)

class TestLater:
    @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.gpus(1))])
    def test_it(self, n, gpus): log("later", gpus)
"""
#: Narrow tests end so late that their worker gets no wide one for want of others: the first once the widest
#: test waits for its boards or has had them, the others once the third wide one has begun, by when its worker
#: has the last one.
IN_TURN = """
def begun(kind): return glob.glob(f"{kind}.*.begun")

def go_on(is_wide):
    kind = "wide" if is_wide else "narrow"
    open(f"{kind}.{len(begun(kind))}.begun", "w").close()
    deadline = time.monotonic() + 120
    while not is_wide and not may_end():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def may_end():
    if len(begun("narrow")) > 1:
        return len(begun("wide")) >= 3
    return begun("wide") or any(map(awaits, glob.glob(os.environ["LLENERGY_LOCK_DIR"] + "/*.holder")))

def awaits(path):
    try:
        return '"queued":["' in open(path).read()
    except FileNotFoundError:
        return False
"""
#: The scheduler of the project.
OWN = """
import pytest
from xdist.scheduler import LoadScheduling
class Mine(LoadScheduling):
    def schedule(self):
        print("mine")
        super().schedule()
@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config, log): return Mine(config, log)
"""


@pytest.fixture
def suite(
    pytester: pytest.Pytester, tmp_path: Path, nvml_children: Callable[[World], World]
) -> pytest.Pytester:
    nvml_children(World(tmp_path / "world", [Board() for _ in range(4)]))
    pytester.makepyfile(SUITE)
    return pytester


def run(suite: pytest.Pytester, *args: str) -> tuple[pytest.RunResult, list[tuple[str, str, int]]]:
    ran = suite.runpytest_subprocess("--energy-report", "-n2", "-s", "-p", "no:cacheprovider", *args)
    ran.assert_outcomes(passed=8)
    return ran, [tuple(json.loads(line)) for line in (suite.path / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_worker_gets_a_test_that_fits_beside_the_others(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE + IN_TURN)
    _, log = run(suite)
    # In the order of the file, each worker would get wide tests and wait for those of the other.
    assert len({worker for worker, _, boards in log if boards > 1}) == 1
    # Tests change places within their class or file only.
    for worker in ("gw0", "gw1"):
        names = [name for where, name, _ in log if where == worker]
        assert names == sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize("dist", ["loadscope", "worksteal", "loadfile"])
def test_other_distributions_stay(suite: pytest.Pytester, dist: str) -> None:
    run(suite, f"--dist={dist}")


def test_a_scheduler_of_the_project_stays(suite: pytest.Pytester) -> None:
    suite.makeconftest(OWN)
    ran, _ = run(suite)
    ran.stdout.fnmatch_lines(["*mine*"])
