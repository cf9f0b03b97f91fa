# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a rank: the right outcome, the right message, in bounded time, and no process left.

Each run is a real pytest with real ranks, in a gloo group if there are several. Processes that are left are
found by a marker in the environment, not by parentage.
"""

from __future__ import annotations

import re

import pytest

from .no_torch import without_torch
from .run_matrix import FORKED, SPAWNED, Where, everywhere
from .survivors import check_nothing_is_left

FAULTS = """
import ctypes
import os
import signal
import time
import pytest

N = int(os.environ["TEST_RANKS"])
pytestmark = pytest.mark.gpus(N, fallback="cpu")

#: Time limit from the first cause until the ranks that wait in a collective are killed, on a busy machine.
#: They would wait far longer.
BOUND_S = 60.0

def wait_for_all():
    if N == 1:
        time.sleep(300)
    import torch.distributed as dist
    dist.barrier()

def last_rank(fault):
    # The others sit in a collective that never comes to its end.
    print("output of", os.environ["RANK"])
    if os.environ["RANK"] == str(N - 1):
        fault()
    wait_for_all()

def refuse():
    raise ValueError("the first cause")

def no_lock_for_others():
    ctypes.PyDLL(None).sleep(300)

@pytest.fixture
def ranks(workers):
    workers.run(max, 1, 2)
    return workers

@pytest.fixture
def bounded(workers):
    workers.run(max, 1, 2)
    start = time.monotonic()
    yield workers
    assert time.monotonic() - start < BOUND_S

def test_signal(bounded):
    bounded.run(last_rank, lambda: os.kill(os.getpid(), signal.SIGSEGV))

def test_exit(bounded):
    bounded.run(last_rank, lambda: os._exit(0))

def test_exception(bounded):
    bounded.run(last_rank, refuse)

def test_lock(bounded):
    bounded.run(last_rank, no_lock_for_others, timeout=3)

def test_hang(bounded):
    bounded.run(last_rank, lambda: time.sleep(300), timeout=3)

def test_memory(bounded):
    bounded.run(last_rank, lambda: bytearray(1 << 48))

def test_much_output_and_much_input(ranks):
    many = bytes(10_000_000)
    assert ranks.run(lambda data: (print("x" * 10_000_000), data)[1], many) == [many] * N

def test_skip(ranks):
    ranks.run(last_rank, lambda: pytest.skip("no such kernel"))

def test_xfail(ranks):
    ranks.run(last_rank, lambda: pytest.xfail("not yet"))

def test_fail(ranks):
    ranks.run(last_rank, lambda: pytest.fail("as it should"))

def test_works_again(ranks):
    assert ranks.run(lambda: int(os.environ["RANK"])) == list(range(N))
"""

#: The message of each test, with ``n`` ranks.
MESSAGES = {
    "test_signal": r"WorkerError: rank {last} of {n} \(cpu, pid \d+\): was killed by SIGSEGV",
    "test_exit": r"WorkerError: rank {last} of {n} \(cpu, pid \d+\): ended with exit code 0 and no result",
    "test_exception": r"WorkerError: rank {last} of {n} \(cpu, pid \d+\): ValueError: the first cause",
    "test_lock": r"WorkerError: .*rank {last} of {n} \(cpu\) did not answer within 3 s; the ranks were ended",
    "test_hang": r"WorkerError: .*rank {last} of {n} \(cpu\) did not answer within 3 s; the ranks were ended",
    "test_memory": r"WorkerError: rank {last} of {n} \(cpu, pid \d+\): MemoryError",
    "test_fail": r"as it should",
}

#: What the stacks of a hanging rank must show.
STACKS = {"test_lock": "in no_lock_for_others", "test_hang": "in <lambda>"}


def sections(output: str) -> dict[str, str]:
    """Return what pytest prints about each failed test."""
    parts = re.split(r"^_{3,} (\w+) _{3,}$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@everywhere(FORKED)
@pytest.mark.slow
def test_every_fault_is_reported_and_leaves_no_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mark: str, where: Where
) -> None:
    n = where.n
    monkeypatch.setenv("TEST_RANKS", str(n))
    pytester.makepyfile(FAULTS)
    # On a busy machine stacks are written late.
    pytester.makeconftest("from pytest_llenergy.ranks import timeouts\ntimeouts.STACKS_TIMEOUT_S = 30.0\n")
    if n == 1:
        without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments(), "-rsx")
    result.assert_outcomes(failed=7, passed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines_random(["*SKIPPED*no such kernel*", "*XFAIL*not yet*"])
    reports = sections(result.stdout.str())
    assert set(reports) == set(MESSAGES)
    for name, pattern in MESSAGES.items():
        assert re.search(pattern.format(n=n, last=n - 1), reports[name]), reports[name]
    for name, frame in STACKS.items():
        assert frame in reports[name]
    for name in ("test_signal", "test_exit", "test_exception", "test_hang"):
        first, *others = re.findall(r"^-+ Captured output of rank (\d) call -+$", reports[name], re.MULTILINE)
        assert first == (str(n - 1) if name != "test_hang" else "0")
        assert len(others) == n - 1
        assert f"output of {n - 1}" in reports[name]
    check_nothing_is_left(mark)


#: A rank with a forked child loses its supervisor and that one's guard.
ORPHANED = """
import os, signal, time, psutil, pytest

@pytest.mark.gpus({n}, fallback="cpu")
def test_orphaned(workers):
    def work():
        if os.fork() and os.environ["RANK"] == "0":
            supervisor = os.getppid()
            guard = psutil.Process(supervisor).ppid()
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for each in (guard, supervisor):
                    os.kill(each, number)
        time.sleep(300)
    workers.run(work)

@pytest.mark.gpus({n}, fallback="cpu")
def test_after(workers):
    assert workers.run(max, 1, 2) == [2] * {n}
"""


@everywhere(SPAWNED)
@pytest.mark.slow
def test_ranks_that_lose_supervisor_and_guard_are_reported_and_leave_no_process(
    pytester: pytest.Pytester, mark: str, where: Where
) -> None:
    pytester.makepyfile(ORPHANED.format(n=where.n))
    without_torch(pytester.path)
    # pytest must not wait for this time limit.
    result = pytester.runpytest_subprocess(*where.arguments(), "--energy-timeout=3000")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["*the supervisor of the ranks (pid *) was ended by SIGKILL; its ranks ended *"]
    )
    check_nothing_is_left(mark)


#: Short time limits of a start, for ranks that hang. Until then a busy machine must have started the
#: supervisor.
SHORT_LIMITS = """
from pytest_llenergy.ranks import timeouts
timeouts.START_TIMEOUT_S, timeouts.SLOW_LOAD_S = 8.0, 5.0
"""

NO_START = """
import pytest
pytestmark = pytest.mark.gpus({n}, fallback="cpu")

@pytest.mark.parametrize("i", range(3))
def test_it(workers, i):
    workers.run(max, 1, 2)

def test_another_environment(workers, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    workers.run(max, 1, 2)
"""

#: What torch does when it is imported, its message, and how often equal ranks are started in vain.
NO_STARTS = {
    "hang": (
        "import time; time.sleep(300)",
        r"did not answer within \d(\.\d+)? s(; the ranks were ended|: it imports torch)",
        1,
    ),
    # Repeating what fails soon costs little.
    "death": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "ended by SIGKILL|killed by SIGKILL",
        3,
    ),
}


@everywhere(SPAWNED, FORKED, name="fault", values=list(NO_STARTS))
@pytest.mark.slow
def test_ranks_that_cannot_start_are_not_started_for_each_test(
    pytester: pytest.Pytester, mark: str, fault: str, where: Where
) -> None:
    code, message, attempts = NO_STARTS[fault]
    pytester.makepyfile(NO_START.format(n=where.n))
    if fault == "hang":
        pytester.makeconftest(SHORT_LIMITS)
    without_torch(pytester.path)
    (pytester.path / "torch" / "__init__.py").write_text(code)
    arguments = where.arguments()
    if where.xdist:
        # Each worker remembers its own.
        arguments = (*arguments, "--dist=loadfile")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=4)
    errors = [line for line in result.stdout.lines if re.match(r"(E +)?(\S+: )?WorkerError: ", line)]
    started = [not re.search(r"WorkerError: not started again: ", line) for line in errors]
    assert all(re.search(message, line) for line in errors), errors
    assert started == [True] * attempts + [False] * (3 - attempts) + [True]
    if fault == "death":
        result.stdout.fnmatch_lines(["stepwise check: the step 'import torch' failed on the CPU: *"])
    check_nothing_is_left(mark)
