# SPDX-License-Identifier: Apache-2.0
"""Which threads and processes may use the ranks of a test, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .no_torch import without_torch
from .survivors import check_nothing_is_left

#: An engine that gets no further than the step of that name, and what of it is in the way of a next test.
STUCK = """
import os, subprocess, time
from pathlib import Path
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.record.record import BackendInfo

def stay(step):
    if os.environ["STUCK_IN"] != step:
        return
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path("begun.new").write_text(f"{os.getpid()} {child.pid}")
    Path("begun.new").rename("begun")
    time.sleep(90)

class Stuck:
    def load(self, model, options, context):
        stay("load")
        return BackendInfo(name="stuck", version="1", model=model.label)
    def prepare(self, prompts, params):
        stay("prepare")
    def synchronize(self): pass
    def close(self): pass

SPEC = BackendSpec("stuck", "stuck:Stuck", (), "", Capabilities(data=True))
"""


TURNS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
kept = []

def test_threads_take_turns(workers):
    kept.append(workers)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: workers.run(pow, i, 2), range(40)))
    assert results == [[i * i] for i in range(40)]

def test_workers_of_an_ended_test_cannot_run():
    kept[0].run(max, 1, 2)

def test_a_measurement_has_the_ranks_to_itself(energy, workers):
    workers.run(max, 1, 2)
    over, others = threading.Event(), []
    def go():
        while not over.is_set():
            others.append(workers.run(lambda: "other"))
    thread = threading.Thread(target=go)
    thread.start()
    while not others:
        time.sleep(0.01)
    try:
        assert energy(workers.call(lambda: "measured")).result == "measured"
    finally:
        over.set()
        thread.join()
    assert all(each == ["other"] for each in others)

def test_a_function_measured_in_this_process_may_use_ranks(energy, workers):
    # From threads that it waits for.
    def work():
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda i: workers.run(pow, i, 2), range(4)))
    assert energy(work).result == [[0], [1], [4], [9]]

def test_a_record_of_this_process_has_no_ranks(energy, workers):
    workers.run(max, 1, 2)
    energy(lambda: time.sleep(0.1))
    workers.run(max, 1, 2)
"""


def test_threads_of_a_test_take_turns_and_a_measurement_is_one(
    quick: pytest.Pytester, read_report: Callable[[], Any]
) -> None:
    quick.makepyfile(TURNS)
    without_torch(quick.path)
    result = quick.runpytest_subprocess("-p", "no:cacheprovider", "--energy-report")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["PlanError: the test of these workers has ended; use the fixtures in the test *"]
    )
    record = read_report()["records"][-1]
    assert (record["ranks"], record["launch"], record["start_method"], record["start_s"]) == (
        [],
        None,
        None,
        None,
    )


@pytest.mark.clock
@pytest.mark.parametrize("step", ["load", pytest.param("prepare", marks=pytest.mark.slow)])
def test_a_load_by_a_thread_ends_with_its_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mark: str, step: str
) -> None:
    """While it is loaded its thread holds what other threads would have to wait for."""
    monkeypatch.setenv("STUCK_IN", step)
    pytester.makepyfile(
        stuck=STUCK,
        conftest="def pytest_llenergy_backends(config):\n    import stuck\n    return [stuck.SPEC]\n",
        test_stuck="""
        import threading, time
        from pathlib import Path
        import psutil
        outcomes, threads = [], []
        def test_leaves(backend):
            def go():
                try:
                    outcomes.append(backend.generate(["hi"]))
                except Exception as error:
                    outcomes.append(str(error))
            threads.append(threading.Thread(target=go, daemon=True))
            threads[0].start()
            while not Path("begun").exists():
                assert threads[0].is_alive(), outcomes
                time.sleep(0.01)
        def test_after(workers):
            # Of those before neither is there any more, nor what they have started.
            assert not [pid for pid in Path("begun").read_text().split() if psutil.pid_exists(int(pid))]
            threads[0].join()
            (outcome,) = outcomes
            assert "ranks" in outcome and "ended" in outcome
            assert workers.run(max, 1, 2) == [2]
        """,
    )
    without_torch(pytester.path)
    arguments = ("-p", "no:cacheprovider", "--energy-backend=stuck", "--timeout=60", "--energy-timeout=600")
    pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=2)
    check_nothing_is_left(mark)
