# SPDX-License-Identifier: Apache-2.0
"""The ``workers`` fixture in real test files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from .no_torch import without_torch

Read = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_functions_of_the_test_file_run_on_every_rank(
    quick: pytest.Pytester, read_report: Read, mode: str
) -> None:
    quick.makepyfile(
        """
        import os
        import pytest
        FACTOR = 3
        def helper(x):
            return x * FACTOR
        def rank_times(x):
            return int(os.environ["RANK"]) * helper(x)
        pids = set()
        @pytest.mark.gpus(2, fallback="cpu")
        def test_run(workers):
            assert workers.run(rank_times, 5) == [0, 15]
            assert workers.run(lambda: os.environ["WORLD_SIZE"]) == ["2", "2"]
            assert workers.run("os.path:join", "a", "b") == ["a/b", "a/b"]
            pids.update(workers.run(os.getpid))
        @pytest.mark.gpus(2, fallback="cpu")
        def test_the_same_ranks_again(workers):
            assert set(workers.run(os.getpid)) == pids and len(pids) == 2
        @pytest.mark.gpus(2, fallback="cpu")
        def test_energy(energy, workers):
            run = energy(workers.call(rank_times, 7))
            assert run.result == [0, 21]
        @pytest.mark.gpus(2, fallback="cpu")
        def test_a_plain_function_runs_in_the_ranks_too(energy):
            run = energy(rank_times, 2)
            assert run.result == [0, 6]
        """
    )
    result = quick.runpytest("--energy-report", f"--import-mode={mode}")
    result.assert_outcomes(passed=4)
    records = read_report()["records"]
    for record in records:
        assert record["fallback"] == "cpu"
        assert record["devices"] == ["cpu", "cpu"]
        assert record["start_method"] == "spawn"
        assert record["launch"] == "ranks"
        assert record["parallel"] == {"data": 2, "tensor": 1, "pipeline": 1}
        assert [(rank["rank"], rank["local_rank"]) for rank in record["ranks"]] == [(0, 0), (1, 1)]
        assert {rank["host"] for rank in record["ranks"]} == {"localhost"}
    assert len({rank["pid"] for record in records for rank in record["ranks"]}) == 2


def test_failures_in_ranks_are_those_of_the_test(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        def check():
            left, right = 3, 4
            assert left == right
        def test_assert(workers):
            workers.run(check)
        def test_skip(workers):
            workers.run(pytest.skip, "no such kernel")
        def test_again(workers):
            assert workers.run(max, 1, 2) == [2]
        @pytest.mark.parallel(data=2)
        def test_contradiction(energy, workers):
            workers.run(max, 1, 2)
        def test_arguments(energy, workers):
            energy(workers.call(max, 1, 2), 3)
        """
    )
    result = quick.runpytest("--energy-report", "-rs")
    result.assert_outcomes(failed=3, skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "WorkerError: rank 0 of 1 (cpu, pid *): AssertionError: assert 3 == 4",
            "PlanError: parallel(data=2, tensor=1, pipeline=1) needs 2 devices and the lease has 1; *",
            "LLEnergyError: energy(workers.call(fn, ...)): give the arguments to call, not to energy",
            "SKIPPED*no such kernel",
        ]
    )


def test_what_is_kept_of_an_ended_test_runs_nowhere(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        kept = []
        def test_one(workers):
            kept.append(workers)
            assert workers.run(max, 1, 2) == [2]
        def test_two():
            kept[0].run(max, 1, 2)
        """
    )
    without_torch(pytester.path)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["PlanError: the test of these workers has ended; use the fixtures in the test *"]
    )


def test_the_record_is_of_the_ranks_that_were_measured(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import os
        import pytest
        pids = []
        @pytest.mark.gpus(1, fallback="cpu")
        def test_it(energy, workers):
            pids.extend(energy(os.getpid).result)
            os.environ["OTHER_RANKS"] = "1"
            assert workers.run(os.getpid) != pids
            print("measured", *pids)
        """
    )
    result = quick.runpytest_subprocess("--energy-report", "-s")
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert f"measured {record['ranks'][0]['pid']}" in result.stdout.str()


def test_ranks_are_interpreters_like_that_of_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        def look():
            return sys.flags.dont_write_bytecode, sys.flags.optimize, sys._xoptions, sys.warnoptions
        def test_it(workers):
            assert workers.run(look) == [(1, 1, {"utf8": True}, ["ignore::UserWarning"])] == [look()]
        """
    )
    without_torch(pytester.path)
    flags = ("-B", "-O", "-X", "utf8", "-W", "ignore::UserWarning")
    for method in ("spawn", "forkserver"):
        arguments = ("-p", "no:cacheprovider", "--assert=rewrite", f"--energy-start-method={method}")
        result = pytester.run(sys.executable, *flags, "-m", "pytest", *arguments)
        result.assert_outcomes(passed=1)


def test_what_has_no_room_on_the_disk_fails_and_names_its_rank(pytester: pytest.Pytester) -> None:
    """The limit of a file's size stands for a full disk: what is large goes by file."""
    pytester.makepyfile(
        """
        import resource

        LARGE = bytes(1_000_000)

        def little_room():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

        def much():
            little_room()
            return LARGE

        def test_from_a_rank(workers):
            workers.run(much)

        def test_to_a_rank(workers):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            little_room()
            try:
                workers.run(len, LARGE)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        def test_after(workers):
            assert workers.run(len, LARGE) == [1_000_000]
        """
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=2, passed=1)
    told = (
        "a message of 10????? bytes to or from a rank goes by file, and * has no room for it (File too *): "
    )
    result.stdout.fnmatch_lines(
        [
            f"WorkerError: rank 0 of 1 (cpu, pid *): WorkerError: {told}set TMPDIR to a directory that has",
            f"WorkerError: {told}set TMPDIR to a directory that has",
            "test_what*.py:*: in test_to_a_rank",
        ]
    )


def test_a_working_directory_that_is_gone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        def test_it(workers, tmp_path, monkeypatch):
            gone = tmp_path / "gone"
            gone.mkdir()
            before = os.getcwd()
            os.chdir(gone)
            gone.rmdir()
            try:
                assert workers.run(max, 1, 2) == [2]
            finally:
                os.chdir(before)
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_debugger_opens_in_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(workers):
            kept_here = "a variable of the test"
            workers.run(lambda: 1 / 0)
        """
    )
    without_torch(pytester.path)
    # From where the error was raised up to the oldest frame.
    commands = b"p 'seen ' + locals().get('kept_here', 'nothing')\nup\n" * 40 + b"q\n"
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pdb", stdin=commands)
    result.stdout.fnmatch_lines(["*seen a variable of the test*"])


def test_threads_of_a_test_take_turns(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from concurrent.futures import ThreadPoolExecutor
        def test_it(workers):
            with ThreadPoolExecutor(8) as threads:
                results = list(threads.map(lambda i: workers.run(pow, i, 2), range(40)))
            assert results == [[i * i] for i in range(40)]
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_energy_has_the_ranks_to_itself(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        import threading
        def test_it(energy, workers):
            workers.run(max, 1, 2)
            over, others = threading.Event(), []
            def go():
                while not over.is_set():
                    others.append(workers.run(lambda: "other"))
            thread = threading.Thread(target=go)
            thread.start()
            try:
                assert energy(workers.call(lambda: "measured")).result == ["measured"]
            finally:
                over.set()
                thread.join()
            assert others and all(each == ["other"] for each in others)
        """
    )
    without_torch(quick.path)
    quick.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_what_a_function_of_this_process_uses_is_free_to_it(quick: pytest.Pytester) -> None:
    """Measured here, it may have ranks at work from threads that it waits for."""
    quick.makepyfile(
        """
        from concurrent.futures import ThreadPoolExecutor
        def test_it(energy, workers):
            def work():
                with ThreadPoolExecutor(2) as threads:
                    return list(threads.map(lambda i: workers.run(pow, i, 2), range(4)))
            assert energy(work).result == [[0], [1], [4], [9]]
        """
    )
    without_torch(quick.path)
    quick.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.parametrize("ready", [True, False], ids=["at work", "starting"])
def test_what_a_thread_leaves_in_the_ranks_ends_with_its_test(pytester: pytest.Pytester, ready: bool) -> None:
    pytester.makepyfile(
        f"""
        import os, threading, time
        from pathlib import Path
        import psutil
        said, threads = [], []
        def slow():
            Path("begun").write_text(str(os.getpid()))
            time.sleep(60)
        def test_leaves(workers):
            def go():
                try:
                    said.append(workers.run(slow))
                except Exception as error:
                    said.append(str(error))
            if {ready}:
                workers.run(max, 1, 2)
            threads.append(threading.Thread(target=go))
            threads[0].start()
            while {ready} and not (Path("begun").exists() and Path("begun").read_text()):
                time.sleep(0.01)
        def test_after(workers):
            # The lease was given back meanwhile.
            if {ready}:
                assert not psutil.pid_exists(int(Path("begun").read_text()))
            threads[0].join(0.0 if {ready} else None)
            (told,) = said
            assert "ended" in told, told
            assert workers.run(max, 1, 2) == [2]
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_a_result_leaves_the_classes_of_the_test_as_they_are(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        from dataclasses import dataclass
        LIMIT = 1
        @dataclass
        class Stats:
            value: float
            made = 100
            def ok(self):
                return self.value < LIMIT
        def work():
            Stats.made += 7
            return Stats(0.5)
        def test_value(workers):
            before = Stats.ok
            (found,) = workers.run(work)
            assert found == Stats(0.5) and type(found) is Stats
            assert Stats.ok is before and Stats.made == 100
        def test_after(monkeypatch):
            monkeypatch.setattr(sys.modules[__name__], "LIMIT", 0)
            assert not Stats(0.5).ok()
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_end_of_a_test_waits_for_no_thread(pytester: pytest.Pytester) -> None:
    """One that pickles for ever, for all that anybody knows."""
    pytester.makepyfile(
        """
        import threading
        told = threading.Event()
        class Endless:
            def __reduce__(self):
                threading.Event().wait()
        def test_leaves(workers):
            workers.run(max, 1, 2)
            threading.Thread(target=workers.run, args=(len, Endless()), daemon=True).start()
        def test_after(workers):
            assert workers.run(max, 1, 2) == [2]
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--timeout=60").assert_outcomes(passed=2)


def test_a_forked_child_of_pytest_has_no_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        from pathlib import Path
        def test_it(workers):
            workers.run(max, 1, 2)
            child = os.fork()
            if child == 0:
                try:
                    Path("said").write_text(str(workers.run(max, 1, 2)))
                except BaseException as error:
                    Path("said").write_text(f"{type(error).__name__}: {error}")
                os._exit(0)
            assert all(workers.run(max, i, 2) == [max(i, 2)] for i in range(50))
            os.waitpid(child, 0)
            assert Path("said").read_text().startswith("PlanError: the ranks of a test are started by its")
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_what_is_measured_in_this_process_has_no_ranks_in_its_record(
    quick: pytest.Pytester, read_report: Read
) -> None:
    quick.makepyfile(
        """
        import time
        def test_it(energy, workers):
            workers.run(max, 1, 2)
            energy(lambda: time.sleep(0.1))
            workers.run(max, 1, 2)
        """
    )
    without_torch(quick.path)
    quick.runpytest_subprocess("-p", "no:cacheprovider", "--energy-report").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert (record["ranks"], record["launch"], record["start_method"], record["start_s"]) == (
        [],
        None,
        None,
        None,
    )


def test_the_exit_code_of_a_run_that_a_rank_ends(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        def test_it(workers):
            workers.run(pytest.exit, "enough of it", 7)
        """
    )
    without_torch(pytester.path)
    assert pytester.runpytest_subprocess("-p", "no:cacheprovider").ret == 7


def test_a_skip_in_a_rank_is_told_with_the_place_of_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_places="""
        import pytest
        def test_one(workers):
            workers.run(pytest.skip, "no such kernel")

        def test_two(workers):
            workers.run(pytest.skip, "no such kernel")
        """
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED [[]1[]] test_places.py:2: no such kernel",
            "SKIPPED [[]1[]] test_places.py:5: no such kernel",
        ]
    )


def test_odd_calls_are_told_in_a_line_with_the_place_in_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_odd="""
        import os, pytest, sys, threading, unittest
        def test_nan(workers):
            workers.run(max, 1, 2, timeout=float("nan"))
        def test_word(workers):
            workers.run(max, 1, 2, timeout="5")
        async def work():
            pass
        def test_async(workers):
            workers.run(work)
        class Later:
            async def __call__(self):
                pass
        def test_async_object(workers):
            workers.run(Later())
        def test_async_by_name(workers):
            workers.run("asyncio:sleep", 0)
        def generate():
            yield 1
        def test_generator(workers):
            workers.run(generate)
        def test_generator_that_only_its_result_tells(energy, workers):
            energy(workers.call(lambda: generate()))
        def test_lock(workers):
            workers.run(id, threading.Lock())
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError
        def mute():
            raise Mute
        def test_mute(workers):
            workers.run(mute)
        def test_signal(workers):
            workers.run(lambda: os.kill(os.getpid(), 40))
        def test_closed(workers):
            workers.run(lambda: sys.stdout.close())
        def test_long(workers):
            assert workers.run(max, 1, 2, timeout=1e10) == [2]
        def skip():
            raise unittest.SkipTest("by unittest")
        def test_skip(workers):
            workers.run(skip)
        def fork():
            return os.fork() and os.wait()[1]
        def test_fork(workers):
            assert workers.run(fork) == [256]
            assert workers.run(max, 1, 2) == [2]
        """
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=10, passed=3, skipped=1)
    assert "never awaited" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "PlanError: workers.run: timeout is nan, needs a number of seconds above 0",
            "test_odd.py:3: in test_nan",
            "PlanError: workers.run: timeout is '5', needs a number of seconds above 0",
            *["PlanError: workers: a call of this function only makes a coroutine or generator; give *"] * 5,
            "WorkerError: workers: id and its arguments cannot be sent to the ranks (TypeError: *",
            "WorkerError: rank 0 of 1 (cpu, pid *): Mute: (its text cannot be had: RuntimeError)",
            "WorkerError: rank 0 of 1 (cpu, pid *): was killed by signal 40",
        ]
    )


GROUPS = """
import pytest

N = {n}
pytestmark = pytest.mark.gpus(N, fallback="cpu")

def state():
    from accelerate import PartialState
    import torch.distributed as dist
    found = PartialState(cpu=True)
    return (dist.get_backend(), dist.get_rank(), dist.get_world_size(), found.num_processes,
            found.process_index, found.local_process_index, found.device.type)

def test_state(workers):
    assert workers.run(state) == [("gloo", rank, N, N, rank, rank, "cpu") for rank in range(N)]

def gradients():
    # Each rank has its part of a batch: the gradients must be those of the whole batch.
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 2)
    batch = torch.arange(12.0 * N).reshape(4 * N, 3)
    together = DistributedDataParallel(torch.nn.Linear(3, 2))
    together.module.load_state_dict(alone.state_dict())
    output = together(batch.chunk(N)[dist.get_rank()])
    output.square().mean().backward()
    expected = alone(batch)
    expected.square().mean().backward()
    same_output = torch.allclose(output, expected.chunk(N)[dist.get_rank()])
    return same_output, torch.allclose(together.module.weight.grad, alone.weight.grad)

def test_ddp(workers):
    assert workers.run(gradients) == [(True, True)] * N

def add_up(numbers):
    import time
    import torch
    import torch.distributed as dist
    value = torch.full((numbers,), dist.get_rank() + 1.0)
    dist.all_reduce(value)
    # Ten watts are known well only over many ticks.
    time.sleep(0.2)
    return float(value.mean())

def test_allreduce(energy, workers):
    assert energy(workers.call(add_up, 1000)).result == [N * (N + 1) / 2] * N
"""


@pytest.mark.parametrize("n", [1, 2, 4])
def test_real_process_groups_are_what_libraries_find(
    quick: pytest.Pytester, read_report: Read, n: int
) -> None:
    quick.makepyfile(GROUPS.format(n=n))
    result = quick.runpytest("--energy-report", "--energy-start-method=forkserver")
    result.assert_outcomes(passed=3)
    (record,) = read_report()["records"]
    assert (record["launch"], record["start_method"], len(record["ranks"])) == ("ranks", "forkserver", n)
    for round_ in record["rounds"]:
        assert round_["duration_s"] >= 0.2
        assert round_["energy_j"] == pytest.approx(10 * round_["duration_s"], abs=0.5)
