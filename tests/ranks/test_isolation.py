# SPDX-License-Identifier: Apache-2.0
"""State that a test leaves in its ranks reaches no other test: it is restored, or the ranks are replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.ranks.workload import call_workload

from . import state_changes
from .groups import plan
from .no_torch import without_torch

TORCH = Capabilities(framework="torch", process_group=True, data=True)

#: Work that runs on, and state that ``state_changes`` does not change.
LEFT = {
    "a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "a busy thread": "import threading\ndef spin():\n while True: pass\n"
    "threading.Thread(target=spin, daemon=True).start()",
    "a thread of the lowest kind": "import _thread, time\n"
    "begun = _thread.allocate_lock(); begun.acquire()\n"
    "_thread.start_new_thread(lambda: (begun.release(), time.sleep(300)), ()); begun.acquire()",
    "a busy executor": "import sys, threading, time; from concurrent.futures import ThreadPoolExecutor\n"
    "begun, sys.pool = threading.Event(), ThreadPoolExecutor(1)\n"
    "sys.pool.submit(lambda: (begun.set(), time.sleep(300))); begun.wait()",
    "a child": "import subprocess; subprocess.Popen(['sleep', '300'])",
    "a fork": "import os, time\nif os.fork() == 0: time.sleep(300); os._exit(0)",
    "a grandchild in its own session": "import subprocess; subprocess.run(['setsid', '-f', 'sleep', '300'])",
    "a child of multiprocessing": "import multiprocessing, time\n"
    "multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(300,), daemon=True).start()",
    "a timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 300)",
    "a timer of work": "import signal; signal.setitimer(signal.ITIMER_PROF, 300)",
    "an alarm": "import signal; signal.alarm(300)",
    "collections at other times": "import gc; gc.set_threshold(10)",
    "SIGCHLD handled": "import signal; signal.signal(signal.SIGCHLD, lambda *_: None)",
    "no output": "import sys; sys.stdout.close()",
    "no descriptor of it": "import os; os.close(2)",
    "another output": "import io, sys; sys.stdout = io.StringIO()",
    "output elsewhere": "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
}

#: What libraries start or set once and keep, and threads and processes that end by themselves.
KEPT = {
    "the monitor of tqdm": "import tqdm; tqdm.tqdm([1])",
    "the resource tracker": "import multiprocessing; multiprocessing.get_context('spawn').Semaphore()",
    "the fork server": "import multiprocessing, time\n"
    "child = multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(0,))\n"
    "child.start(); child.join()",
    "an idle executor": "import sys, time; from concurrent.futures import ThreadPoolExecutor\n"
    "sys.pool = ThreadPoolExecutor(1); sys.pool.submit(time.sleep, 0).result()",
    "a thread about to end": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(0.05,)).start()",
    "a child about to end": "import subprocess; subprocess.Popen(['sleep', '300']).kill()",
    "more files": "import resource\n"
    "limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))",
    "another umask": "import os; os.umask(0o777)",
    "the sharer of descriptors": "import multiprocessing.reduction as r; r.DupFd(0)",
}

#: What torch starts once and keeps.
KEPT_IN_TORCH = {
    "a tensor in a queue": "import torch.multiprocessing\n"
    "queue = torch.multiprocessing.Queue(); queue.put(torch.ones(3)); queue.get()\n"
    "queue.close(); queue.join_thread()",
    "functions that torch.compile replaces": "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(3))",
    "the finders of transformers": "import transformers; from transformers import AutoModelForCausalLM",
    "limits that torch.compile raises": "import setuptools, sys; sys.setrecursionlimit(2000)",
    "a tensor in a file": "import torch.multiprocessing as m\n"
    "m.set_sharing_strategy('file_system'); torch.ones(3).share_memory_()",
}

#: Those that import torch.compile, and context variables, which are those of a request to a rank.
SLOW_CHANGES = (
    *("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"),
    *("stance of the compiler", "backend of the compiler"),
    *("precision of decimals", "errors of numpy"),
)

#: Lengthens the time limits for what ends by itself and for ranks that clean up late, for busy machines.
PATIENCE = (
    "from pytest_llenergy.ranks import timeouts\n"
    "timeouts.LEFTOVERS_TIMEOUT_S, timeouts.COLLECTIVES_TIMEOUT_S = 30.0, 20.0"
)

#: Leaves a handler of SIGCHLD.
DATA_LOADER = """
from torch.utils.data import DataLoader
import signal
assert [int(each) for each in DataLoader(range(3), num_workers=1)] == [0, 1, 2]
assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks without torch, shared by the tests of this module."""
    pool = RankPool(60.0, "spawn", "backend")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def forks() -> Iterator[RankPool]:
    """Forked ranks with torch, which start fast."""
    pool = RankPool(60.0, "forkserver", "backend")
    yield pool
    pool.close()


def call(
    pool: RankPool, function: Callable[..., Any], *args: Any, capabilities: Capabilities | None = None
) -> Any:
    """Return the answer of the only rank, in a test that then ends."""
    (result,) = call_all(pool, 1, function, *args, capabilities=capabilities)
    return result


def call_all(
    pool: RankPool,
    count: int,
    function: Callable[..., Any],
    *args: Any,
    capabilities: Capabilities | None = None,
) -> list[Any]:
    """Return the answers of the ranks, in a test that then ends."""
    ranks = pool.get_ranks(plan(count) if capabilities is None else plan(count, capabilities))
    workload = call_workload(ranks, function, args, {}, 600)
    workload.run_round()
    results = list(workload.results())
    pool.finish_test()
    return results


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_ranks_with_leftovers_are_replaced(pool: RankPool, code: str) -> None:
    first = call(pool, os.getpid)
    call(pool, exec, code, {})
    assert call(pool, os.getpid) != first


def test_threads_and_processes_that_libraries_keep_are_no_leftovers(pool: RankPool) -> None:
    first = call(pool, os.getpid)
    call(pool, exec, PATIENCE, {})
    for name, code in KEPT.items():
        call(pool, exec, code, {})
        assert call(pool, os.getpid) == first, name


@pytest.mark.parametrize("code", KEPT_IN_TORCH.values(), ids=KEPT_IN_TORCH)
def test_processes_that_torch_keeps_are_no_leftovers(forks: RankPool, code: str) -> None:
    first = call(forks, os.getpid, capabilities=TORCH)
    call(forks, exec, f"import torch\n{PATIENCE}\n{code}", {}, capabilities=TORCH)
    assert call(forks, os.getpid, capabilities=TORCH) == first


def test_workers_of_a_data_loader_are_no_leftovers(forks: RankPool) -> None:
    first = call(forks, os.getpid, capabilities=TORCH)
    call(forks, exec, f"{PATIENCE}\n{DATA_LOADER}", {}, capabilities=TORCH)
    assert call(forks, os.getpid, capabilities=TORCH) == first


@pytest.fixture(scope="module")
def fresh(forks: RankPool) -> dict[str, Any]:
    """What the first test of a rank finds there."""
    return dict(call(forks, state_changes.look, capabilities=TORCH))


def check_next_test(forks: RankPool, fresh: dict[str, Any], changes: list[tuple[str, bool]]) -> None:
    """Make changes in a test, each in the main or in another thread; the next test must find a fresh rank."""

    def change_all(codes: list[tuple[str, bool]]) -> None:
        import threading

        for code, in_thread in codes:
            if in_thread:
                thread = threading.Thread(target=exec, args=(code, {}))
                thread.start()
                thread.join()
            else:
                exec(code, {})

    codes = [(state_changes.change([name]), in_thread) for name, in_thread in changes]
    # One change may make the next fail, but each alone is possible.
    with suppress(WorkerError) if len(changes) > 1 else nullcontext():
        call(forks, change_all, codes, capabilities=TORCH)
    found = call(forks, state_changes.look, capabilities=TORCH)
    assert {name: found[name] for name in fresh if found[name] != fresh[name]} == {}


SEQUENCES = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([*state_changes.TORCH, *state_changes.PROCESS]), strategies.booleans()
    ),
    min_size=1,
    max_size=6,
)
SETTINGS = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(SETTINGS, derandomize=True, max_examples=6)
@given(changes=SEQUENCES)
def test_random_changes_reach_no_other_test(
    forks: RankPool, fresh: dict[str, Any], changes: list[tuple[str, bool]]
) -> None:
    check_next_test(forks, fresh, changes)


@pytest.mark.slow
@settings(SETTINGS, max_examples=200, print_blob=True)
@given(changes=SEQUENCES)
def test_many_random_changes_reach_no_other_test(
    forks: RankPool, fresh: dict[str, Any], changes: list[tuple[str, bool]]
) -> None:
    check_next_test(forks, fresh, changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*state_changes.TORCH, *state_changes.PROCESS])
def test_a_change_reaches_no_other_test(forks: RankPool, fresh: dict[str, Any], name: str) -> None:
    check_next_test(forks, fresh, [(name, False)])


def test_each_change_is_restored_or_found(forks: RankPool) -> None:
    names = [name for name in (*state_changes.TORCH, *state_changes.PROCESS) if name not in SLOW_CHANGES]
    codes = {name: state_changes.change([name]) for name in names}
    assert call(forks, find_missed, codes, state_changes.look, capabilities=TORCH) == []


def find_missed(codes: dict[str, str], look: Callable[[], Any]) -> list[str]:
    """Return the names of changes, each made in a fork of the rank, that are neither restored nor found."""
    import gc
    import os

    from pytest_llenergy.ranks.isolation import Leftovers
    from pytest_llenergy.ranks.process_state import RestorableState

    def is_missed(code: str, before: Any) -> bool:
        restorable, leftovers = RestorableState(), Leftovers()
        exec(code, {})
        try:
            restorable.restore()
            gc.collect()
            left = leftovers.find()
        except OSError:
            # Ranks that cannot be cleaned up are replaced.
            return False
        return not left and (before is None or look() != before)

    missed = set(codes)
    # To look takes long, and few changes are restored.
    for describe in (lambda: None, look):
        for name in sorted(missed):
            pid = os.fork()
            if pid == 0:
                try:
                    os._exit(is_missed(codes[name], describe()))
                finally:
                    os._exit(2)
            if os.waitpid(pid, 0)[1] == 0:
                missed.remove(name)
    return sorted(missed)


#: What tests do to the process group of two ranks.
GROUP_CHANGES = {
    "an operation on one rank": "if dist.get_rank() == 0: dist.left = dist.all_reduce(ones, async_op=True)",
    "another group": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    "no group": "dist.destroy_process_group()",
}


@pytest.mark.parametrize("code", GROUP_CHANGES.values(), ids=GROUP_CHANGES)
def test_process_groups_reach_no_other_test(forks: RankPool, code: str) -> None:
    def reduce() -> tuple[int, float]:
        import os

        import torch
        import torch.distributed as dist

        ones = torch.ones(1)
        dist.all_reduce(ones)
        return os.getpid(), float(ones)

    first = call_all(forks, 2, reduce, capabilities=TORCH)
    call_all(forks, 2, exec, PATIENCE, {}, capabilities=TORCH)
    assert call_all(forks, 2, reduce, capabilities=TORCH) == first
    # What is left open is to be found soon.
    prefix = "from pytest_llenergy.ranks import timeouts; timeouts.COLLECTIVES_TIMEOUT_S = 2.0\n"
    prefix += "import torch, torch.distributed as dist; ones = torch.ones(1)\n"
    call_all(forks, 2, exec, prefix + code, {}, capabilities=TORCH)
    after = call_all(forks, 2, reduce, capabilities=TORCH)
    assert [value for _, value in after] == [2.0, 2.0]
    assert {pid for pid, _ in after}.isdisjoint(pid for pid, _ in first)


def test_a_delayed_exit_reaches_no_other_test(pool: RankPool) -> None:
    first = call(pool, os.getpid)
    call(pool, exec, "import faulthandler; faulthandler.dump_traceback_later(8, exit=True)", {})
    assert call(pool, exec, "import time; time.sleep(8.2)", {}) is None
    assert call(pool, os.getpid) == first


def test_the_umask_is_restored(pool: RankPool) -> None:
    def change_umask(mask: int) -> tuple[int, int]:
        import os

        return os.getpid(), os.umask(mask)

    first = call(pool, change_umask, 0o777)
    assert call(pool, change_umask, 0o777) == first


def test_a_kept_log_explains_why_ranks_were_replaced(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import gc
        def test_it(workers):
            workers.run(gc.disable)
        """
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--energy-rank-logs=logs")
    result.assert_outcomes(passed=1)
    (log,) = (pytester.path / "logs").glob("*/rank0.log")
    assert "because this one left behind: garbage collection\n" in log.read_text()


def test_the_record_of_the_next_test_explains_its_new_ranks(
    quick: pytest.Pytester, read_report: Callable[[], Any]
) -> None:
    quick.makepyfile(
        settles="""
        import os
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        def work(): return os.sched_getscheduler(0)
        """,
        test_it="""
        import os, signal
        def ignore():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def scheduler():
            return os.sched_getscheduler(0), signal.getsignal(signal.SIGTERM)
        def test_imported(workers):
            assert workers.run("settles:work") == [os.SCHED_BATCH]
        def test_measured(energy, workers):
            assert workers.run(scheduler) == [(os.SCHED_OTHER, signal.SIG_DFL)]
            energy(workers.call(ignore))
        def test_after_it(energy, workers):
            energy(workers.call(scheduler))
            assert workers.run(scheduler) == [(os.SCHED_OTHER, signal.SIG_DFL)]
        def test_warm(energy, workers):
            energy(workers.call(scheduler))
        """,
    )
    without_torch(quick.path)
    quick.runpytest_subprocess("--energy-report").assert_outcomes(passed=4)
    records = read_report()["records"]
    details = [
        [flag["detail"] for flag in record["flags"] if flag["name"] == "ranks-replaced"] for record in records
    ]
    text = "the ranks are new, because an earlier test left behind: "
    assert details == [[f"{text}scheduling or cores of the main thread"], [f"{text}signal handlers"], []]


def test_the_next_test_does_not_run_beside_leftovers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal, subprocess, sys, threading, time
        children = []
        def leave():
            # Long enough for the test to end before.
            signal.setitimer(signal.ITIMER_REAL, 8)
            threading.Thread(target=time.sleep, args=(300,), name="leftover", daemon=True).start()
            return subprocess.Popen(["sleep", "300"]).pid
        def test_a(workers):
            children.extend(workers.run(leave))
        def look():
            time.sleep(8.2)
            return [thread.name for thread in threading.enumerate()]
        def test_b(workers):
            assert workers.run(look) == [["MainThread"]]
            assert not os.path.exists(f"/proc/{children[0]}")
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_random_numbers_are_the_same_in_new_and_warm_ranks(start_method: Any) -> None:
    def draw() -> tuple[int, float, float, float]:
        import os
        import random

        import numpy
        import torch

        return os.getpid(), random.random(), float(numpy.random.random()), float(torch.rand(()))

    pool = RankPool(60.0, start_method, "backend")
    try:
        drawn = [call(pool, draw, capabilities=TORCH) for _ in range(2)]
        ranks = pool.get_ranks(plan(1, TORCH))
        ranks.close()
        drawn.append(call(pool, draw, capabilities=TORCH))
    finally:
        pool.close()
    assert drawn[0] == drawn[1]
    assert drawn[2][0] != drawn[0][0]
    assert drawn[2][1:] == drawn[0][1:]
