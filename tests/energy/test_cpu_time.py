# SPDX-License-Identifier: Apache-2.0
"""CPU time of the host against psutil's, and of process trees: simulated ones, and real busy loops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_llenergy.energy import cpu_time
from pytest_llenergy.energy.cpu_time import (
    ProcessTable,
    ProcessTree,
    Usage,
    read_cpu_time,
)

pytestmark = pytest.mark.clock

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class TestHost:
    def test_cpu_time_includes_the_work_of_this_process(self) -> None:
        before = read_cpu_time()
        spin(0.3)
        after = read_cpu_time()
        # Ticks of 10 ms on every CPU.
        assert after.busy_s - before.busy_s >= 0.3 - 0.02 * (os.cpu_count() or 1)
        assert after.stolen_s >= before.stolen_s >= 0


class FakeProcess:
    """A process of ``FakeTable``."""

    def __init__(self, parent: int, own_s: float = 0.0, ended_s: float = 0.0) -> None:
        self.parent = parent
        self.own_s = own_s
        self.ended_s = ended_s
        self.exists = True

    def read(self) -> Usage | None:
        return Usage(self.own_s, self.ended_s // 0.01 * 0.01) if self.exists else None


class FakeTable(ProcessTable):
    """Processes of a simulated kernel."""

    def __init__(self) -> None:
        self.processes: dict[int, FakeProcess] = {}
        self._new: set[int] = set()

    def fork(self, pid: int, parent: int, own_s: float = 0.0, ended_s: float = 0.0) -> FakeProcess:
        self.processes[pid] = FakeProcess(parent, own_s, ended_s)
        self._new.add(pid)
        return self.processes[pid]

    def reap(self, pid: int, by: int | None = None) -> None:
        """End a process; its parent waits for it, or somebody else, or nobody (0)."""
        process = self.processes.pop(pid)
        process.exists = False
        for child in self.processes.values():
            child.parent = 1 if child.parent == pid else child.parent
        waiting = self.processes.get(process.parent if by is None else by)
        if waiting is not None:
            waiting.ended_s += process.own_s + process.ended_s

    def newcomers(self) -> set[int]:
        new, self._new = self._new, set()
        return new

    def open(self, pid: int) -> FakeProcess | None:  # type: ignore[override]
        return self.processes.get(pid)


ROOT, CHILD, GRANDCHILD, STRANGER = 100, 101, 102, 900


@pytest.fixture
def table() -> FakeTable:
    """Return a root that has worked for 5 s, and a stranger."""
    table = FakeTable()
    table.fork(ROOT, 1, own_s=5.0, ended_s=3.005)
    table.fork(STRANGER, 1, own_s=70.0)
    return table


class TestSimulatedTree:
    def test_time_from_before_the_start_does_not_count(self, table: FakeTable) -> None:
        table.fork(CHILD, ROOT, own_s=2.0)
        tree = ProcessTree({ROOT}, table)
        assert tree.pids == {ROOT, CHILD}
        assert tree.cpu_time_s() == 0.0

    def test_the_sum_stays_the_same_when_a_child_is_waited_for(self, table: FakeTable) -> None:
        tree = ProcessTree({ROOT}, table)
        table.fork(CHILD, ROOT, own_s=0.3333)
        table.fork(GRANDCHILD, CHILD, own_s=0.4444)
        assert tree.cpu_time_s() == pytest.approx(0.7777)
        table.reap(GRANDCHILD)
        assert tree.cpu_time_s() == pytest.approx(0.7777, abs=0.01)
        table.reap(CHILD)
        assert tree.cpu_time_s() == pytest.approx(0.7777, abs=0.01)
        assert tree.pids == {ROOT}

    def test_children_that_were_never_seen_count_to_20_ms(self, table: FakeTable) -> None:
        tree = ProcessTree({ROOT}, table)
        for pid in range(200, 300):
            table.fork(pid, ROOT, own_s=0.0123)
            table.reap(pid)
        assert tree.cpu_time_s() == pytest.approx(1.23, abs=0.02)

    def test_errors_of_ended_children_do_not_add_up(self, table: FakeTable) -> None:
        tree = ProcessTree({ROOT}, table)
        for pid in range(200, 300):
            child = table.fork(pid, ROOT, own_s=0.05)
            tree.cpu_time_s()
            child.own_s += 0.0777
            table.reap(pid)
            tree.cpu_time_s()
        assert tree.cpu_time_s() == pytest.approx(12.77, abs=0.02)

    @pytest.mark.parametrize("by", [0, 1, STRANGER])
    def test_a_child_for_which_no_member_waits_still_counts(self, table: FakeTable, by: int) -> None:
        tree = ProcessTree({ROOT}, table)
        table.fork(CHILD, ROOT, own_s=0.8)
        tree.cpu_time_s()
        table.reap(CHILD, by)
        assert tree.cpu_time_s() == pytest.approx(0.8, abs=0.02)

    @pytest.mark.parametrize("seen", [True, False], ids=["seen as an orphan", "not seen"])
    def test_an_orphan_that_ends_hides_no_later_children(self, table: FakeTable, seen: bool) -> None:
        tree = ProcessTree({ROOT}, table)
        table.fork(CHILD, ROOT)
        table.fork(GRANDCHILD, CHILD, own_s=2.0)
        assert tree.cpu_time_s() == pytest.approx(2.0)
        table.reap(CHILD)
        if seen:
            tree.cpu_time_s()
        table.reap(GRANDCHILD, by=0)
        if not seen:
            tree.cpu_time_s()
        for pid in range(200, 210):
            table.fork(pid, ROOT, own_s=0.2)
            table.reap(pid)
        assert tree.cpu_time_s() == pytest.approx(4.0, abs=0.03)

    def test_an_orphan_remains_a_member(self, table: FakeTable) -> None:
        tree = ProcessTree({ROOT}, table)
        table.fork(CHILD, ROOT)
        orphan = table.fork(GRANDCHILD, CHILD, own_s=0.1)
        tree.cpu_time_s()
        table.reap(CHILD)
        orphan.own_s += 0.4
        table.fork(103, GRANDCHILD, own_s=0.2)
        assert tree.cpu_time_s() == pytest.approx(0.7)
        table.reap(103)
        table.reap(GRANDCHILD)
        assert tree.cpu_time_s() == pytest.approx(0.7, abs=0.02)


def spin(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


SPIN = "import time\nwhile time.process_time() < {}: pass\n"

#: Say that something is done, and go on with the next line of the standard input, or end with it.
THEN_WAIT = "import sys\nprint(flush=True)\nsys.stdin.readline() or sys.exit()\n"


def python(script: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def await_line(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process, or one that inherits its output, has done something."""
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"


def go_on(process: subprocess.Popen[bytes]) -> None:
    """Let the process, or one that inherits its input, go on."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


@contextmanager
def neighbours(n: int) -> Iterator[None]:
    """Run busy processes whose parent is not this one: orphans of a shell."""
    # Bounded, in case this process is killed.
    loop = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    script = f"{sys.executable} -c '{loop}' >/dev/null 2>&1 & echo $!"
    pids = [int(subprocess.check_output(["sh", "-c", script])) for _ in range(n)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def watched_s(tree: ProcessTree, work: subprocess.Popen[bytes], every_s: float = 0.02) -> float:
    """Return the CPU time of the tree once a process has ended, reading meanwhile."""
    before_s = tree.cpu_time_s()
    while work.poll() is None:
        tree.cpu_time_s()
        time.sleep(every_s)
    return tree.cpu_time_s() - before_s


#: CPU time of an interpreter that starts and ends, and of the reader, on a busy machine.
START_S = 0.25


@needs_proc
class TestRealTree:
    def test_work_in_this_process_counts_exactly(self) -> None:
        tree = ProcessTree({os.getpid()})
        before_s, from_s = time.process_time(), tree.cpu_time_s()
        spin(0.5)
        to_s, after_s = tree.cpu_time_s(), time.process_time()
        assert 0.5 <= to_s - from_s <= after_s - before_s
        tree.close()

    @pytest.mark.parametrize("every_s", [0.02, 10.0], ids=["seen", "unseen"])
    def test_a_child_that_ends_counts(self, every_s: float) -> None:
        tree = ProcessTree({os.getpid()})
        with python(SPIN.format(0.5)) as child:
            if every_s > 1:
                child.wait()
            used_s = watched_s(tree, child, every_s)
        if every_s > 1:
            used_s = tree.cpu_time_s()
        assert 0.5 <= used_s <= 0.5 + START_S

    @pytest.mark.parametrize("waits", [True, False], ids=["waited-for", "ignored"])
    def test_a_grandchild_counts(self, waits: bool) -> None:
        tree = ProcessTree({os.getpid()})
        script = "import signal, subprocess, sys\n"
        script += "" if waits else "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        script += f"subprocess.Popen([sys.executable, '-c', {SPIN.format(0.5) + THEN_WAIT!r}]).wait()\n"
        with python(script, stdin=subprocess.PIPE) as child:
            await_line(child)
            # Time since the last reading is lost where nobody waits.
            tree.cpu_time_s()
            go_on(child)
            child.wait()
            # That of ended processes is counted in ticks of 10 ms.
            assert 0.5 - 0.02 <= tree.cpu_time_s() <= 0.5 + 2 * START_S

    def test_an_orphan_of_a_descendant_counts(self) -> None:
        tree = ProcessTree({os.getpid()})
        inner = THEN_WAIT + SPIN.format(0.5) + THEN_WAIT
        script = (
            "import subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-c', {inner!r}])\ntime.sleep(600)\n"
        )
        with python(script, stdin=subprocess.PIPE) as child:
            await_line(child)
            tree.cpu_time_s()
            child.kill()
            child.wait()
            go_on(child)
            await_line(child)
            assert 0.5 <= tree.cpu_time_s() <= 0.5 + 2 * START_S

    @pytest.mark.parametrize("n", [1, 4])
    def test_neighbours_do_not_count(self, n: int) -> None:
        with neighbours(n):
            tree = ProcessTree({os.getpid()})
            before_s = time.process_time()
            spin(0.5)
            with neighbours(1):
                used_s, spent_s = tree.cpu_time_s(), time.process_time() - before_s
        assert used_s == pytest.approx(spent_s, abs=0.05)

    def test_readings_never_fall(self) -> None:
        tree = ProcessTree({os.getpid()})
        script = "import subprocess, sys\nfor _ in range(40): subprocess.run(['true'])\n"
        readings = []
        with python(script) as child:
            while child.poll() is None:
                readings.append(tree.cpu_time_s())
        readings.append(tree.cpu_time_s())
        assert all(b >= a - 1e-9 for a, b in pairwise(readings))


@needs_proc
def test_new_processes_are_found_also_where_the_latest_id_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in gVisor."""
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 0/0 0\n")
    for proc in (cpu_time.PROC, tmp_path):
        monkeypatch.setattr(cpu_time, "PROC", proc)
        table = ProcessTable()
        assert os.getpid() in table.newcomers()
        with python("input()", stdin=subprocess.PIPE) as child:
            deadline_s = time.monotonic() + 30
            while child.pid not in (found := table.newcomers()):
                assert time.monotonic() < deadline_s
            assert os.getpid() not in found
            assert child.pid not in table.newcomers()
            child.kill()
