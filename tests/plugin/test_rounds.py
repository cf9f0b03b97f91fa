# SPDX-License-Identifier: Apache-2.0
"""The mark ``energy_options``: what it changes, what it overrides, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]


def test_calls_are_warm_up_plus_rounds_times_iterations(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_options(rounds=3, warmup=4, iterations=5)
        def test_it(energy):
            calls = []
            run = energy(lambda: calls.append(1) or len(calls))
            assert len(calls) == run.result == 4 + 3 * 5
            assert [each.iterations for each in run.rounds] == [5, 5, 5]
        def test_function_gets_arguments_of_these_names(energy):
            run = energy(lambda rounds, iterations: (rounds, iterations), rounds=3, iterations=9)
            assert run.result == (3, 9) and len(run.rounds) == 2
        """
    )
    quick.runpytest("--energy-report").assert_outcomes(passed=2)
    procedure = read_report()["records"][0]["procedure"]
    assert (procedure["warmup_iterations"], procedure["iterations"]) == (4, 5)


def test_each_setting_comes_from_the_closest_mark(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.energy_options(rounds=3, warmup=1, target="50%", budget=0.01)
        @pytest.mark.energy_options(rounds=4, iterations=2)
        class TestIt:
            @pytest.mark.energy_options(iterations=3)
            @pytest.mark.parametrize("i", [0, pytest.param(1, marks=pytest.mark.energy_options(rounds=1))])
            def test_it(self, energy, i): energy(lambda: None)
        def test_plain(): pass
        """
    )
    # The marks override ini file and command line, which set rounds, warm-up, target and budget too.
    quick.runpytest("--energy-report", "--energy-rounds=5", "--energy-target=40%").assert_outcomes(passed=3)
    names = ("warmup_iterations", "iterations", "target", "budget_s")
    found = [
        (len(record["rounds"]), *(record["procedure"][name] for name in names))
        for record in read_report()["records"]
    ]
    assert found == [(4, 1, 3, 0.5, 0.01), (1, 1, 3, 0.5, 0.01)]


def test_warm_up_can_be_automatic_again(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_options(warmup="auto", budget=20, rounds=1)
        def test_it(energy):
            calls = []
            energy(calls.append, 1)
            assert len(calls) > 5
        """
    )
    quick.runpytest().assert_outcomes(passed=1)


#: Arguments of the mark, and why they are refused.
WRONG = {
    "rounds=0": "rounds is 0, needs a whole number, 1 or more",
    "rounds=-1": "rounds is -1, needs a whole number, 1 or more",
    "rounds='3'": "rounds is '3', needs a whole number, 1 or more",
    "rounds=True": "rounds is True, needs a whole number, 1 or more",
    "iterations=2.5": "iterations is 2.5, needs a whole number, 1 or more",
    "warmup=-1": "warmup is -1, needs a whole number, 0 or more",
    "target=0": "target is 0, needs a share between 0 and 1, such as 2% or 0.02",
    "target='low'": "target is 'low', needs a share between 0 and 1, such as 2% or 0.02",
    "budget=0": "budget is 0, needs a number of seconds above 0",
    "budget='5 J'": "budget is '5 J', needs a number of seconds above 0",
    "budget=float('nan')": "budget is nan, needs a number of seconds above 0",
    "cycles=3": "got an unexpected keyword argument 'cycles'",
    "3": "too many positional arguments",
    "": "names no setting; add one, such as rounds=10, or remove the mark",
}


def test_wrong_values_are_one_line_at_collection(quick: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.energy_options({})\ndef test_it(energy): energy(int)\n"
    quick.makepyfile(**{f"test_{index:02}": source.format(given) for index, given in enumerate(WRONG)})
    result = quick.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    accepted = "(it takes: rounds, warmup, target, budget, iterations)"
    assert [
        line for line in result.outlines if line.startswith("test_") and "@pytest.mark.energy_options" in line
    ] == [
        f"test_{index:02}.py::test_it: @pytest.mark.energy_options: {why} {accepted}"
        for index, why in enumerate(WRONG.values())
    ]


def test_marked_numbers_travel_with_records_of_workers(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_options(rounds=3, iterations=2)
        def test_it(energy):
            energy.extra_info.update(accuracy=0.5, shape=(2, 3), labels={1: "ü"})
            energy(int)
        """
    )
    quick.runpytest("--energy-report", "-n1").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert [each["iterations"] for each in record["rounds"]] == [2, 2, 2]
    assert record["extra_info"] == {"accuracy": 0.5, "shape": [2, 3], "labels": {"1": "ü"}}


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_sessions_of_ab_decide_the_rounds(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    (quick.path / "earlier.json").write_text('{"done": [], "devices": {}, "own": {}}')
    monkeypatch.setenv("LLENERGY_AB_SESSION", str(quick.path))
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_options(rounds=3, iterations=2)
        @pytest.mark.parametrize("pedantic", [True, False])
        def test_it(energy, pedantic):
            run = energy.pedantic(int, rounds=4) if pedantic else energy(int)
            assert [each.iterations for each in run.rounds] == [2]
        """
    )
    result = quick.runpytest("-p", "pytest_llenergy.ab.session_plugin", "--energy-rounds=1", workers)
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "mark", "rounds"),
    [
        # Without a number, three rounds remain of six if the budget is spent.
        ((), "", 3),
        (("--energy-rounds=auto",), "", 3),
        (("--energy-rounds=4",), "", 4),
        ((), "rounds=5", 5),
        (("--energy-rounds=2",), "warmup=1", 2),
    ],
)
def test_the_budget_shortens_only_rounds_that_nobody_asked_for(
    pytester: pytest.Pytester, read_report: Read, options: tuple[str, ...], mark: str, rounds: int
) -> None:
    pytester.makeini("[pytest]\nenergy_budget = 0.01\n")
    pytester.makepyfile(
        f"""
        import pytest
        pytestmark = [pytest.mark.energy_options({mark})] if {bool(mark)} else []
        def test_it(energy):
            energy(sum, range(1000))
        """
    )
    pytester.runpytest("--energy-report", *options).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert len(record["rounds"]) == rounds
    assert record["procedure"]["budget_s"] == 0.01
