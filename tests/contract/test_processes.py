# SPDX-License-Identifier: Apache-2.0
"""Processes: what a rank finds, what is left when a run ends in whatever way, and what failures say."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.nvml_sim import Board

from .conftest import GiveBoards
from .project import Ended, Project, wait_for

#: Ranks that never end, with a child in a session of its own each.
ENDLESS = """
import os, subprocess, sys
import pytest

def work():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(["sh", "-c", '"$0" -c "import time; time.sleep(600)" &', sys.executable])
    open("running-" + os.environ["RANK"], "w").close()
    import time
    time.sleep(600)

@pytest.mark.gpus(2, fallback="cpu")
def test_endless(workers):
    workers.run(work)
"""

RELEASED = """
def test_next(energy_meter):
    with energy_meter("w"):
        pass
"""


@pytest.fixture
def running(project: Project) -> Project:
    project.without_torch()
    project.write("test_endless.py", ENDLESS)
    project.write("test_next.py", RELEASED)
    return project


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("spawn", signal.SIGINT),
        ("spawn", signal.SIGTERM),
        ("spawn", signal.SIGKILL),
        ("spawn", signal.SIGHUP),
        ("forkserver", signal.SIGKILL),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_nothing_is_left_however_pytest_ends(running: Project, method: str, number: signal.Signals) -> None:
    process = running.start_pytest("test_endless.py", f"--energy-start-method={method}")
    wait_for(lambda: running.exists("running-0", "running-1"))
    # pytest, two ranks, and two children of each at least.
    assert len(running.processes()) >= 7
    # A terminal sends these two to the whole group in front.
    (os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=200)
    if number == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED, out + err
    assert running.survivors() == {}
    running.pytest("test_next.py", running.meter(), "--energy-lease-timeout=20").check(passed=1)


def test_nothing_is_left_when_the_supervisor_is_killed_too(running: Project) -> None:
    """All that pytest has started is found at its end."""
    process = running.start_pytest("test_endless.py")
    wait_for(lambda: running.exists("running-0", "running-1"))
    between = [pid for pid in running.processes() if pid != process.pid and int(stat(pid)[1]) == process.pid]
    assert between
    for pid in between:
        os.kill(pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "failed" in out
    assert running.survivors() == {}


def stat(pid: int) -> list[str]:
    """Return state, parent and so on of a process."""
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()


FAILURES = """
import os, signal, sys, time
import pytest

pytestmark = pytest.mark.gpus(2, fallback="cpu")

def in_rank_1(action):
    print("last words of rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "1":
        action()
    time.sleep(0.2 if action is None else 30)

def test_segfault(workers):
    workers.run(in_rank_1, lambda: os.kill(os.getpid(), signal.SIGSEGV))

def test_out_of_memory(workers):
    workers.run(in_rank_1, lambda: os.kill(os.getpid(), signal.SIGKILL))

def test_exit(workers):
    workers.run(in_rank_1, lambda: os._exit(3))

def test_exit_0(workers):
    workers.run(in_rank_1, lambda: os._exit(0))

def test_measured(energy, workers):
    energy(workers.call(in_rank_1, lambda: os._exit(7)))

def test_after(workers):
    assert workers.run(lambda: 1) == [1, 1]
"""


@pytest.fixture(scope="module")
def failures(module_project: Project) -> dict[str, Ended]:
    module_project.without_torch()
    module_project.write("test_failures.py", FAILURES)
    tests = module_project.suite("test_failures.py", module_project.meter())
    module_project.write("said", module_project.said)
    return tests


def test_a_dead_rank_is_named_with_its_cause(failures: dict[str, Ended], module_project: Project) -> None:
    """In the failure and in the record, with what it printed; the next test has new ranks."""
    for name, word in {
        "test_segfault": "SIGSEGV",
        "test_out_of_memory": "SIGKILL",
        "test_exit": r"\b3\b",
        "test_exit_0": r"\b0\b",
        "test_measured": r"\b7\b",
    }.items():
        assert failures[name].outcome == "failure", name
        assert "rank 1" in failures[name].why
        assert re.search(word, failures[name].why), failures[name].why
    assert failures["test_after"] == Ended("passed", "")
    assert module_project.text("said").count("last words of rank 1") >= len(failures) - 1
    record = module_project.records()["test_measured"]
    assert record["status"] in ("crashed", "failed")
    assert "rank 1" in record["reason"]


ENVIRONMENT = """
import os
import pytest

#: Read once, when the module is imported, as numerical libraries do.
READ_AT_IMPORT = "import os\\nTHREADS = os.environ.get('OMP_NUM_THREADS')\\nOWN = os.environ.get('OWN')\\n"

@pytest.fixture(autouse=True, scope="session")
def library():
    with open("library.py", "w") as file:
        file.write(READ_AT_IMPORT)

def imported():
    import library
    return library.THREADS, library.OWN

@pytest.mark.gpus(2)
def test_visibility(workers, gpus):
    found = workers.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == list(gpus.uuids)
    assert workers.run(lambda: os.environ["CUDA_DEVICE_ORDER"]) == ["PCI_BUS_ID"] * 2

@pytest.mark.gpus(2)
def test_coordinates(workers):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = workers.run(lambda: [os.environ[name] for name in names])
    assert found == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    address = workers.run(lambda: (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    assert len(set(address)) == 1

def test_a_rank_of_the_cpu_sees_no_gpu(workers):
    assert workers.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == [""]

def test_threads_are_set_before_the_first_import(workers):
    assert workers.run(imported) == [("1", "a")]

def test_variable_of_a_later_test_reaches_a_fresh_import(workers, monkeypatch):
    monkeypatch.setenv("OWN", "b")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert workers.run(imported)[0][1] == "b"

def test_everything_else_is_as_in_pytest(workers):
    assert workers.run(os.getcwd) == [os.getcwd()]

def test_pytest_sees_what_it_saw_before():
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
"""


@pytest.fixture(scope="module")
def environment(module_project: Project, give_boards: GiveBoards) -> dict[str, Ended]:
    module_project.without_torch()
    give_boards(module_project, [Board(), Board()])
    module_project.write("env/test_env.py", ENVIRONMENT)
    given = {"OMP_NUM_THREADS": "1", "OWN": "a", "RANK": "9", "WORLD_SIZE": "99"}
    return module_project.suite("env", "--energy-isolation=test", **given)


def test_a_rank_sees_its_own_board_and_variables_from_its_first_import_on(
    environment: dict[str, Ended],
) -> None:
    assert len(environment) == 7
    assert {name: ended for name, ended in environment.items() if ended.outcome != "passed"} == {}


UNITTEST = """
import unittest
import pytest

class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _workers(self, workers):
        self.workers = workers

    def test_it(self):
        def work():
            print("what the rank printed")
            raise LookupError("no such layer")
        self.workers.run(work)

    def test_skips(self):
        self.workers.run(pytest.skip, "no such kernel")

    def test_xfails(self):
        self.workers.run(pytest.xfail, "not yet")

    def test_passes(self):
        assert self.workers.run(max, 1, 2) == [2]
"""


def test_a_failure_in_a_unittest_case_is_as_short_as_in_a_function(project: Project) -> None:
    project.without_torch()
    project.write("test_u.py", UNITTEST)
    ended = project.pytest()
    ended.check(failed=1, skipped=1, xfailed=1, passed=1)
    assert "LookupError" in ended.out
    assert len(ended.lines) < 60
    assert "what the rank printed" in ended.out


NO_SOCKETS = """
import socket

class Refused(RuntimeError):
    pass

class Guarded(socket.socket):
    def __new__(cls, *args, **kwargs):
        raise Refused("a test tried to use a socket")

def pytest_runtest_setup(item):
    socket.socket = Guarded
"""


def test_one_rank_works_where_sockets_are_forbidden(project: Project) -> None:
    project.without_torch()
    project.write("conftest.py", NO_SOCKETS)
    project.write("test_s.py", "def test_it(workers): assert workers.run(lambda: 1) == [1]\n")
    project.pytest().check(passed=1)
