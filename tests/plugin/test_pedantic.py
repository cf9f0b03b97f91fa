# SPDX-License-Identifier: Apache-2.0
"""``energy.pedantic``: exactly the calls that were asked for, as pytest-benchmark makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..ranks.no_torch import without_torch

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]


def test_calls_are_those_asked_for(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        def test_default(energy):
            calls = []
            run = energy.pedantic(lambda: calls.append(1) or len(calls))
            assert run.result == len(calls) == len(run.rounds) == 1
        def test_numbers(energy):
            calls = []
            run = energy.pedantic(
                lambda a, b: calls.append((a, b)), args=[1], kwargs={"b": 2},
                rounds=4, iterations=3, warmup_rounds=2,
            )
            assert calls == [(1, 2)] * (2 * 3 + 4 * 3)
            assert [each.iterations for each in run.rounds] == [3] * 4
        @pytest.mark.energy_options(rounds=3, iterations=2, warmup=1)
        def test_mark_fills_in(energy):
            calls = []
            run = energy.pedantic(calls.append, (0,), iterations=4)
            assert len(calls) == 1 + 3 * 4
        """
    )
    # Neither the target nor the budget adds a round, and options of the run do not apply.
    args = ("--energy-report", "--energy-rounds=7", "--energy-target=0.0001%", "--energy-budget=60")
    quick.runpytest(*args).assert_outcomes(passed=3)
    procedure = read_report()["records"][1]["procedure"]
    assert (procedure["warmup_iterations"], procedure["iterations"], procedure["budget_s"]) == (6, 3, 0.0)


def test_setup_and_teardown_run_once_a_round_outside_of_it(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        import time
        def test_arguments_from_setup(energy):
            log = []
            def setup():
                time.sleep(0.2)
                log.append("setup")
                return (len(log),), {"flag": True}
            run = energy.pedantic(
                lambda number, flag: log.append(number), setup=setup, rounds=2, warmup_rounds=1,
                teardown=lambda number, flag: log.append(-number),
            )
            assert log == ["setup", 1, -1, "setup", 4, -4, "setup", 7, -7]
            assert run.duration_s < 0.1
        def test_setup_without_arguments(energy):
            log = []
            run = energy.pedantic(sum, args=([1, 2],), setup=lambda: log.append(1), rounds=3)
            assert run.result == 3 and len(log) == 3
        def test_setup_that_makes_arguments_now_and_then(energy):
            seen, made = [], iter([((1,), {}), None, False, ((2,), {})])
            energy.pedantic(lambda n=0: seen.append(n), setup=lambda: next(made), rounds=4)
            assert seen == [1, 0, 0, 2]
        """
    )
    quick.runpytest().assert_outcomes(passed=3)


#: Arguments of ``pedantic``, and the line that they give.
WRONG = {
    "int, rounds=0": "energy.pedantic: rounds is 0, needs a whole number, 1 or more",
    "int, rounds='2'": "energy.pedantic: rounds is '2', needs a whole number, 1 or more",
    "int, iterations=-1": "energy.pedantic: iterations is -1, needs a whole number, 1 or more",
    "int, warmup_rounds=-1": "energy.pedantic: warmup_rounds is -1, needs a whole number, 0 or more",
    "int, setup=int, iterations=2": "energy.pedantic: setup prepares one call: use iterations=1 *",
    "int, setup=object": "energy.pedantic: setup returned object, needs None, or (args, kwargs) where *",
    "int, ('1',), setup=lambda: ((), {})": "energy.pedantic: setup returned tuple, needs None, *",
    "7": "energy: 7 is not callable; *",
    "workers.call(int), setup=int": "energy.pedantic: setup runs in pytest's own process, but *",
    "workers.call(int), teardown=int": "energy.pedantic: teardown runs in pytest's own process, but *",
    "workers.call(int), (1,)": "energy(workers.call(fn, ...)): pass the arguments to call, not to energy",
    "int); energy(int": "energy() was called twice in one test; *",
    "energy(int).result or int": "energy() was called twice in one test; *",
}


def test_misuse_is_one_line(quick: pytest.Pytester) -> None:
    tests = [f"def test_{n}(energy, workers): energy.pedantic({each})\n" for n, each in enumerate(WRONG)]
    quick.makepyfile("".join(tests), test_unknown="def test_it(energy): energy.pedantic(int, cycles=2)\n")
    result = quick.runpytest()
    result.assert_outcomes(failed=len(WRONG) + 1)
    lines = [f"LLEnergyError: {line}" for line in WRONG.values()]
    result.stdout.fnmatch_lines([*lines, "*TypeError: *unexpected keyword argument 'cycles'"])


def test_automatic_warm_up_of_a_mark_and_a_setup(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.energy_options(warmup="auto", budget=20)
        def test_refused(energy): energy.pedantic(int, setup=lambda: None)
        def test_overridden(energy): energy.pedantic(int, setup=lambda: None, warmup_rounds=0)
        def test_without_setup(energy):
            calls = []
            energy.pedantic(calls.append, (1,))
            assert len(calls) > 5
        """
    )
    result = quick.runpytest()
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["LLEnergyError: energy.pedantic: setup prepares one call: *"])


def test_traceback_of_setup_goes_from_the_test_to_it(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        def prepare(): raise ValueError("on purpose")
        def test_it(energy): energy.pedantic(int, setup=prepare)
        """
    )
    result = quick.runpytest()
    result.assert_outcomes(failed=1)
    places = [line for line in result.outlines if line.startswith(("test_", "pytest_llenergy", "/"))]
    assert [line.split(":")[0].split("/")[-1] for line in places if ".py:" in line] == [
        "test_traceback_of_setup_goes_from_the_test_to_it.py"
    ] * 2


def test_ranks_run_the_calls_asked_for(quick: pytest.Pytester) -> None:
    without_torch(quick.path)
    quick.makepyfile(
        """
        import pytest
        def count(step):
            import builtins
            builtins.calls = getattr(builtins, "calls", 0) + step
            return builtins.calls
        def test_call(energy, workers):
            run = energy.pedantic(workers.call(count, 1), rounds=2, iterations=3, warmup_rounds=1)
            assert run.result == 9
        @pytest.mark.gpus(2, fallback="cpu")
        def test_function(energy):
            run = energy.pedantic(count, kwargs={"step": 1}, rounds=2, iterations=2)
            assert run.result == [4, 4]
        """
    )
    quick.runpytest("--energy-isolation=test").assert_outcomes(passed=2)
