# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a rank: the right outcome, the right message, in bounded time, and no process left.

Each run is a real pytest with real ranks, in a gloo group if there are several. Processes that are left are
found by a marker in the environment, not by parentage.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

from pytest_llenergy.workers.start_method import StartMethod

from .groups import METHODS
from .no_torch import without_torch
from .survivors import await_none, check_nothing_is_left, marked, survivors


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


FAULTS = """
import ctypes
import os
import signal
import time
import pytest

N = int(os.environ["TEST_RANKS"])
pytestmark = pytest.mark.gpus(N, fallback="cpu")

#: Time limit from the first cause until the ranks that wait in a collective are killed, on an idle machine.
#: The time that these ranks took to start is added, as a measure of how busy the machine is.
BOUND_S = 5.0

def wait_for_all():
    if N == 1:
        time.sleep(60)
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
    ctypes.PyDLL(None).sleep(60)

@pytest.fixture
def ranks(workers):
    workers.run(max, 1, 2)
    return workers

@pytest.fixture
def bounded(workers):
    before = time.monotonic()
    workers.run(max, 1, 2)
    start = time.monotonic()
    yield workers
    assert time.monotonic() - start < BOUND_S + (start - before)

def test_signal(bounded):
    bounded.run(last_rank, lambda: os.kill(os.getpid(), signal.SIGSEGV))

def test_exit(bounded):
    bounded.run(last_rank, lambda: os._exit(0))

def test_exception(bounded):
    bounded.run(last_rank, refuse)

def test_lock(bounded):
    bounded.run(last_rank, no_lock_for_others, timeout=1)

def test_hang(bounded):
    bounded.run(last_rank, lambda: time.sleep(60), timeout=1)

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
    "test_lock": r"WorkerError: .*rank {last} of {n} \(cpu\) did not answer within 1 s; the ranks were ended",
    "test_hang": r"WorkerError: .*rank {last} of {n} \(cpu\) did not answer within 1 s; the ranks were ended",
    "test_memory": r"WorkerError: rank {last} of {n} \(cpu, pid \d+\): MemoryError",
    "test_fail": r"as it should",
}
#: What the stacks of a hanging rank must show.
STACKS = {"test_lock": "in no_lock_for_others", "test_hang": "in <lambda>"}


def sections(output: str) -> dict[str, str]:
    """Return what pytest prints about each failed test."""
    parts = re.split(r"^_{3,} (\w+) _{3,}$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@everywhere(FORKED, Where(1, "spawn", xdist=False))
def test_every_fault_is_reported_and_leaves_no_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mark: str, where: Where
) -> None:
    n = where.n
    monkeypatch.setenv("TEST_RANKS", str(n))
    pytester.makepyfile(FAULTS)
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


HANGS = """
import os, time, pytest

@pytest.mark.gpus({n}, fallback="cpu")
def test_hangs(workers):
    workers.run(lambda: (open("running-" + os.environ["RANK"], "w").close(), time.sleep(300)))

def test_after():
    pass
"""


@everywhere(SPAWNED, FORKED, name="ended_by", values=["signal", "thread"])
def test_a_timeout_of_pytest_timeout_leaves_no_process(
    pytester: pytest.Pytester, mark: str, ended_by: str, where: Where
) -> None:
    pytester.makepyfile(HANGS.format(n=where.n))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments(), "--timeout=4", f"--timeout-method={ended_by}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    # The thread method ends the process at once, without teardown; a worker of pytest-xdist just vanishes.
    message = "crashed while running" if ended_by == "thread" and where.xdist else "Timeout"
    assert message in result.stdout.str() + result.stderr.str()
    if ended_by == "signal" or where.xdist:
        result.assert_outcomes(failed=1, passed=1)
    check_nothing_is_left(mark)


@everywhere(SPAWNED, FORKED)
def test_ctrl_c_ends_every_process(pytester: pytest.Pytester, mark: str, where: Where) -> None:
    pytester.makepyfile(HANGS.format(n=where.n))
    without_torch(pytester.path)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *where.arguments()],
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as pytest_:
        for _ in range(6000):
            if len(list(pytester.path.glob("running-*"))) == where.n:
                break
            time.sleep(0.01)
        # As a terminal does: to the whole group in front.
        os.killpg(pytest_.pid, signal.SIGINT)
        output, _ = pytest_.communicate(timeout=60)
    assert pytest_.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output
    check_nothing_is_left(mark)


ENDS = """
import os, pytest

N = {n}
pytestmark = pytest.mark.gpus(N, fallback="cpu")

@pytest.mark.parametrize("i", range(3))
def test_it(workers, i):
    def work():
        if os.environ["RANK"] == str(N - 1):
            {work}
    workers.run(work)
"""


#: What a rank does, by its name, and what pytest then prints.
ENDINGS = {
    "ctrl-c": ("raise KeyboardInterrupt", "!! KeyboardInterrupt !!"),
    "exit": ("pytest.exit('enough of it')", "Exit: enough of it"),
}


@everywhere(SPAWNED, FORKED, name="ending", values=list(ENDINGS))
def test_ctrl_c_and_pytest_exit_in_a_rank_end_the_run(
    pytester: pytest.Pytester, mark: str, ending: str, where: Where
) -> None:
    work, message = ENDINGS[ending]
    pytester.makepyfile(ENDS.format(n=where.n, work=work))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments())
    # pytest-xdist does not distinguish the two.
    assert ("received keyboard-interrupt" if where.xdist else message) in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "passed" not in result.parseoutcomes()
    check_nothing_is_left(mark)


@everywhere(FORKED, SPAWNED, name="failed", values=[1, 2])
def test_maxfail_leaves_no_process(pytester: pytest.Pytester, mark: str, failed: int, where: Where) -> None:
    option = "-x" if failed == 1 else f"--maxfail={failed}"
    pytester.makepyfile(ENDS.format(n=where.n, work="raise ValueError"))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments(), option)
    assert f"stopping after {failed} failures" in result.stdout.str()
    # A worker of pytest-xdist may have begun its next test before it hears that enough have failed.
    found = result.parseoutcomes()
    assert failed <= found["failed"] <= failed + where.xdist
    assert "passed" not in found
    check_nothing_is_left(mark)


@pytest.mark.parametrize(
    ("n", "method"),
    [
        (1, "spawn"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "forkserver"), (4, "spawn"), (4, "forkserver"))
        ),
    ],
)
def test_an_xdist_worker_that_dies_leaves_no_process(
    pytester: pytest.Pytester, mark: str, n: int, method: StartMethod
) -> None:
    pytester.makepyfile(
        f"""
        import os, signal, pytest
        pytestmark = pytest.mark.gpus({n}, fallback="cpu")
        def test_dies(workers):
            workers.run(max, 1, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        def test_after(workers):
            assert workers.run(max, 1, 2) == [2] * {n}
        """,
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*Where(n, method, xdist=True).arguments())
    result.assert_outcomes(passed=1, failed=1)
    assert "crashed while running" in result.stdout.str()
    check_nothing_is_left(mark)


@pytest.mark.parametrize(
    ("n", "method"),
    [
        (2, "spawn"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "spawn"), (1, "forkserver"), (4, "spawn"), (4, "forkserver"))
        ),
    ],
)
def test_a_killed_xdist_controller_leaves_no_process(
    pytester: pytest.Pytester, mark: str, n: int, method: StartMethod
) -> None:
    pytester.makepyfile(HANGS.format(n=n))
    without_torch(pytester.path)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *Where(n, method, xdist=True).arguments()],
        cwd=pytester.path,
        stdout=subprocess.DEVNULL,
    ) as controller:
        while len(list(pytester.path.glob("running-*"))) < n:
            assert controller.poll() is None
            time.sleep(0.01)
        controller.kill()
        # execnet ends a worker five seconds after its controller.
        assert await_none(mark, 4.5) == {}
    check_nothing_is_left(mark)


#: A rank with a forked child, which keeps its connection open, loses its supervisor and that one's guard.
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


@everywhere(SPAWNED, FORKED)
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


#: Short time limits of a start and its diagnosis, for ranks that hang.
SHORT_LIMITS = """
from pytest_llenergy.doctor import steps
from pytest_llenergy.workers import timeouts
timeouts.START_TIMEOUT_S = 3.0
steps.TEST_TRIAL_TIMEOUT_S = 1.0
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
        r"did not answer within (3|2\.\d+) s(; the ranks were ended|: it imports torch)",
        1,
    ),
    "error": ("raise ImportError('no libcudart')", "ImportError: no libcudart", 1),
    "death": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "ended by SIGKILL|killed by SIGKILL",
        2,
    ),
}


@everywhere(SPAWNED, FORKED, name="fault", values=list(NO_STARTS))
def test_ranks_that_cannot_start_are_not_started_for_each_test(
    pytester: pytest.Pytester, mark: str, fault: str, where: Where
) -> None:
    code, message, attempts = NO_STARTS[fault]
    pytester.makepyfile(NO_START.format(n=where.n))
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
    check_nothing_is_left(mark)


KILLED = """
import os, subprocess, time, pytest
def work():
    # As some libraries leave: in a session of its own, without inherited descriptors.
    subprocess.Popen(["sleep", "300"], start_new_session=True, close_fds=True)
    time.sleep(0.05)
@pytest.mark.parametrize("i", range(1000))
def test_it(workers, monkeypatch, i):
    if i % 3 == 0:
        # Other ranks.
        monkeypatch.setenv("FRESH", str(i))
    workers.run(work)
"""

#: How many runs are started and killed at a time. Each batch takes some seconds.
AT_A_TIME = 2

#: A run is killed between its start and this many times the time until the first run had ranks.
LATEST = 1.5


@dataclass(frozen=True)
class Killable:
    """A run of pytest, the marker of its processes, and the directory of its leases."""

    mark: str
    locks: Path
    pytest_: subprocess.Popen[bytes]

    def has_ranks(self) -> bool:
        # Beside pytest itself, the supervisor and its guard.
        return len(survivors(self.mark)) > 3


@pytest.mark.parametrize(
    ("method", "kills"),
    [
        ("spawn", 2),
        pytest.param("spawn", 16, marks=pytest.mark.slow),
        pytest.param("forkserver", 16, marks=pytest.mark.slow),
    ],
)
def test_a_pytest_that_is_killed_at_any_moment_leaves_no_process_and_no_lease(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kills: int
) -> None:
    pytester.makepyfile(KILLED)
    without_torch(pytester.path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--energy-start-method={method}"]

    def start(end: ExitStack) -> Killable:
        mark = end.enter_context(marked())
        locks = tmp_path / mark
        locks.mkdir(mode=0o700)
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(locks))
        return Killable(mark, locks, subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL))

    def kill(run: Killable) -> None:
        run.pytest_.kill()
        run.pytest_.wait()
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(run.locks))
        check_nothing_is_left(run.mark)

    with ExitStack() as end:
        began_s = time.monotonic()
        running = [start(end) for _ in range(AT_A_TIME)]
        while not all(run.has_ranks() for run in running):
            time.sleep(0.05)
        latest_s = LATEST * (time.monotonic() - began_s)
        for run in running:
            kill(run)
    had_ranks = 0
    for first in range(0, kills, AT_A_TIME):
        with ExitStack() as end:
            began_s = time.monotonic()
            running = [start(end) for _ in range(AT_A_TIME)]
            for place, run in enumerate(running):
                # Spread over the whole time, in every batch.
                moment_s = latest_s * (place + (first + 0.5) / kills) / AT_A_TIME
                time.sleep(max(0.0, began_s + moment_s - time.monotonic()))
                had_ranks += run.has_ranks()
                kill(run)
    # Otherwise they were killed too early to prove anything.
    assert had_ranks >= kills // 8
