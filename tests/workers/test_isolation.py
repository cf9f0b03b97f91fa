# SPDX-License-Identifier: Apache-2.0
"""State that a test leaves in its ranks reaches no other test: it is restored, or the ranks are replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.workers.pool import RankPool
from pytest_llenergy.workers.workload import call_workload

from .groups import plan
from .no_torch import without_torch

TORCH = Capabilities(framework="torch", process_group=True, data=True)

#: Work that runs on, and settings that are changed.
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
    "niceness": "import os; os.nice(5)",
    "no collection": "import gc; gc.disable()",
    "collections at other times": "import gc; gc.set_threshold(10)",
    "SIGTERM ignored": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "SIGCHLD handled": "import signal; signal.signal(signal.SIGCHLD, lambda *_: None)",
    "a signal blocked": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
    "a profile": "import sys; sys.setprofile(lambda *_: None)",
    "a trace": "import sys; sys.settrace(lambda *_: None)",
    "traced memory": "import tracemalloc; tracemalloc.start()",
    "little recursion": "import sys; sys.setrecursionlimit(500)",
    "few files": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    "no output": "import sys; sys.stdout.close()",
    "no descriptor of it": "import os; os.close(2)",
    "another output": "import io, sys; sys.stdout = io.StringIO()",
    "output elsewhere": "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
}

#: Changed settings of torch.
LEFT_IN_TORCH = (
    "torch.set_grad_enabled(False)",
    "torch.mode = torch.inference_mode(); torch.mode.__enter__()",
    "torch.set_default_device('meta')",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_num_threads(7)",
    "torch.use_deterministic_algorithms(True)",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.mkldnn.enabled = False",
    "torch.autograd.set_detect_anomaly(True)",
    "torch.mode = torch.autocast('cpu'); torch.mode.__enter__()",
)

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
    "a tensor in a file": "import torch.multiprocessing as m\n"
    "m.set_sharing_strategy('file_system'); torch.ones(3).share_memory_()",
}

#: Lengthens the time limit for what ends by itself, for busy machines.
PATIENCE = "from pytest_llenergy.workers import timeouts; timeouts.LEFTOVERS_TIMEOUT_S = 30.0"

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
    ranks = pool.get_ranks(plan(1) if capabilities is None else plan(1, capabilities))
    workload = call_workload(ranks, function, args, {}, 60)
    workload.run_round()
    (result,) = workload.results()
    pool.finish_test()
    return result


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_ranks_with_leftovers_are_replaced(pool: RankPool, code: str) -> None:
    first = call(pool, os.getpid)
    call(pool, exec, code, {})
    assert call(pool, os.getpid) != first


@pytest.mark.parametrize(
    "code", [*LEFT_IN_TORCH[:2], *(pytest.param(code, marks=pytest.mark.slow) for code in LEFT_IN_TORCH[2:])]
)
def test_ranks_with_changed_torch_settings_are_replaced(forks: RankPool, code: str) -> None:
    first = call(forks, os.getpid, capabilities=TORCH)
    call(forks, exec, f"import torch; {code}", {}, capabilities=TORCH)
    assert call(forks, os.getpid, capabilities=TORCH) != first


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


def test_the_next_test_does_not_run_beside_leftovers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal, subprocess, sys, threading, time
        children = []
        def leave():
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            threading.Thread(target=time.sleep, args=(300,), name="leftover", daemon=True).start()
            return subprocess.Popen(["sleep", "300"]).pid
        def test_a(workers):
            children.extend(workers.run(leave))
        def look():
            time.sleep(1)
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
