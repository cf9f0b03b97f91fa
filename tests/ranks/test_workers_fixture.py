# SPDX-License-Identifier: Apache-2.0
"""The ``workers`` fixture in real test files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from .no_torch import without_torch

Read = Callable[..., dict[str, Any]]


@pytest.mark.slow
def test_ranks_have_the_interpreter_flags_of_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        def look():
            return sys.flags.dont_write_bytecode, sys._xoptions, sys.warnoptions
        def test_it(workers):
            assert workers.run(look) == [(1, {"utf8": True}, ["ignore::UserWarning"])] == [look()]
        """
    )
    without_torch(pytester.path)
    flags = ("-B", "-X", "utf8", "-W", "ignore::UserWarning")
    arguments = ("-p", "no:cacheprovider", "--assert=rewrite")
    pytester.run(sys.executable, *flags, "-m", "pytest", *arguments).assert_outcomes(passed=1)


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


def test_a_result_may_be_of_a_class_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from dataclasses import dataclass
        @dataclass
        class Stats:
            value: float
        def test_value(workers):
            (found,) = workers.run(lambda: Stats(0.5))
            assert found == Stats(0.5) and type(found) is Stats
        """
    )
    without_torch(pytester.path)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_invalid_calls_are_reported_in_one_line_with_their_place(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_odd="""
        import os, sys, threading, unittest
        def test_nan(workers):
            workers.run(max, 1, 2, timeout=float("nan"))
        async def work():
            pass
        def test_async(workers):
            workers.run(work)
        def test_async_by_name(workers):
            workers.run("asyncio:sleep", 0)
        def generate():
            yield 1
        def test_generator_that_only_its_result_tells(energy, workers):
            energy(workers.call(lambda: generate()))
        def test_lock(workers):
            workers.run(id, threading.Lock())
        def test_fixture(workers, capsys):
            workers.run(lambda: capsys.readouterr())
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
    # One of them is measured, by default for twenty seconds.
    short = ("--energy-rounds=1", "--energy-warmup=0", "--energy-budget=0.1")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", *short)
    result.assert_outcomes(failed=8, passed=3, skipped=1)
    # At the line of the test.
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_odd.py:33: by unittest"])
    assert "never awaited" not in result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "PlanError: workers.run: timeout is nan, needs a number of seconds above 0",
            "test_odd.py:3: in test_nan",
            *["PlanError: workers: a call of this function only makes a coroutine or generator; give *"] * 3,
            "WorkerError: workers: id and what it uses * (TypeError: *_thread.lock*); create it in the *",
            "WorkerError: workers: test_fixture* cannot be sent to the ranks (*",
            "WorkerError: rank 0 of 1 (cpu, pid *): Mute: <exception str() failed>",
            "WorkerError: rank 0 of 1 (cpu, pid *): was killed by signal 40",
        ]
    )
