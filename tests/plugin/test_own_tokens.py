# SPDX-License-Identifier: Apache-2.0
"""Tokens of a test's own function: ``energy(fn, output_tokens=...)``, counted for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..ranks.no_torch import without_torch

pytestmark = [pytest.mark.clock, pytest.mark.usefixtures("few_plugins")]

Read = Callable[..., dict[str, Any]]


def tokens_by_test(report: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Return input and output tokens of each round."""
    return {
        record["id"].split("::")[1]: [
            (each["tokens"]["input"], each["tokens"]["output"]) for each in record["rounds"]
        ]
        for record in report["records"]
    }


def check_against_ten_watts(record: dict[str, Any]) -> None:
    """Check the energy per output token against a count by hand, from duration and tokens of the rounds."""
    per_token = [10 * each["duration_s"] / each["tokens"]["output"] for each in record["rounds"]]
    found = record["metrics"]["energy_per_output_token_j"]["value"]
    assert found == pytest.approx(sum(per_token) / len(per_token), rel=0.02)


def test_tokens_are_those_of_a_call_and_rounds_have_several(
    quick: pytest.Pytester, read_report: Read
) -> None:
    quick.makepyfile(
        """
        import time, pytest
        from functools import partial

        buffer = []
        def generate(prompt):
            time.sleep(0.05)
            buffer.extend(prompt)
            return buffer  # the same object, two tokens longer in each call

        def answer(prompt, output_tokens=4):
            time.sleep(0.05)
            return output_tokens

        class Eight:
            def __index__(self):
                return 8

        @pytest.mark.energy_options(iterations=4)
        def test_number(energy):
            run = energy(time.sleep, 0.05, output_tokens=32, input_tokens=Eight())
            assert abs(run.energy_per_output_token_j * 32 / run.energy_j - 1) < 0.001
            assert abs(run.output_tokens_per_s * run.duration_s / 32 - 1) < 0.001
            assert abs(run.energy_per_token_j * 40 / run.energy_j - 1) < 0.001

        @pytest.mark.energy_options(iterations=3)
        def test_lengths(energy):
            run = energy(generate, "ab", output_tokens=len)
            assert run.result == list("ab" * 6)

        @pytest.mark.energy_options(iterations=2, warmup=1)
        def test_partial(energy):
            run = energy(partial(answer, output_tokens=16), "?", output_tokens=lambda found: found)
            assert run.result == 16

        def test_pedantic(energy):
            run = energy.pedantic(
                answer, kwargs={"prompt": "?", "output_tokens": 5}, rounds=2, warmup_rounds=1, iterations=3,
                output_tokens=5, input_tokens=lambda found: 2 * found,
            )
            assert run.result == 5 and "per call" in repr(run.rounds[0])
        """
    )
    result = quick.runpytest("--energy-report")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*per token*", "test_number *mJ *"])
    report = read_report()
    assert tokens_by_test(report) == {
        "test_number": [(32, 128), (32, 128)],
        "test_lengths": [(0, 2 + 4 + 6), (0, 8 + 10 + 12)],
        "test_partial": [(0, 32), (0, 32)],
        "test_pedantic": [(30, 15), (30, 15)],
    }
    for record in report["records"]:
        check_against_ten_watts(record)
    (lengths,) = (each for each in report["records"] if "lengths" in each["id"])
    assert lengths["rounds"][0]["requests"] is None
    reasons = {
        name: metric["reason"] for name, metric in lengths["metrics"].items() if metric["value"] is None
    }
    assert reasons["energy_per_token_j"] == "the workload has no input tokens"
    assert reasons["time_to_first_token_s"] == "no token timestamps"
    assert reasons["inter_token_latency_s"].startswith("no token timestamps")
    assert reasons["decode_energy_per_output_token_j"] == "the workload has no phases"


def test_tokens_of_ranks_add_up_unless_they_hold_parts_of_one_model(
    quick: pytest.Pytester, read_report: Read
) -> None:
    without_torch(quick.path)
    quick.makepyfile(
        """
        import os, time, pytest

        calls = []
        def generate():
            time.sleep(0.05)
            calls.append(1)
            return [0] * (len(calls) + 100 * int(os.environ["RANK"]))
        def length(result):
            return len(result)
        pytestmark = pytest.mark.energy_options(iterations=2)
        two = pytest.mark.gpus(2, fallback="cpu")

        def test_one(energy, workers):
            assert energy(workers.call(generate), output_tokens=length).result == [0] * 4
        @two
        def test_sum(energy, workers):
            run = energy(workers.call(generate), output_tokens=lambda result: len(result))
            assert [len(each) for each in run.result] == [4, 104]
        @two
        def test_function(energy):
            energy(time.sleep, 0.05, output_tokens=16)
        @two
        @pytest.mark.parallel(tensor=2)
        def test_tensor(energy, workers):
            run = energy(workers.call(time.sleep, 0.05), output_tokens=16)
            assert run.result == [None, None]
        @two
        @pytest.mark.parallel(pipeline=2)
        def test_parts_differ(energy, workers):
            energy(workers.call(generate), output_tokens=length)
        """
    )
    result = quick.runpytest("--energy-report", "--energy-isolation=test")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["WorkerError: ranks 0 and 1 hold parts of one model (mark parallel), and their counts of tokens *"]
    )
    report = read_report()
    parts_differ = report["records"].pop()
    assert (parts_differ["status"], parts_differ["rounds"][-1]["tokens"]) == ("failed", None)
    assert tokens_by_test(report) == {
        "test_one": [(0, 1 + 2), (0, 3 + 4)],
        "test_sum": [(0, 1 + 2 + 101 + 102), (0, 3 + 4 + 103 + 104)],
        "test_function": [(0, 64), (0, 64)],
        "test_tensor": [(0, 32), (0, 32)],
    }
    for record in report["records"]:
        check_against_ten_watts(record)


#: Arguments of ``energy``, and the line that they give.
WRONG = {
    "f, 'x', output_tokens=-1": "energy: output_tokens is -1; give the number of tokens of one call *",
    "f, 'x', output_tokens=True": "energy: output_tokens is True; give the number of tokens of one call *",
    "f, 'x', output_tokens=1.5": "energy: output_tokens is 1.5; give the number of tokens of one call *",
    "f, 'x', output_tokens=str": "energy: output_tokens of f returned 'x'; give the number *",
    "f, 'x', input_tokens=lambda r: -2": "energy: input_tokens of f returned -2; give the number *",
    "workers.call(f, 'x'), input_tokens=str": "energy: input_tokens of f returned 'x'; give the number *",
    "own, output_tokens=4": "energy: output_tokens is the tokens of a call, but own has a parameter *"
    "functools.partial(own, output_tokens=...)",
    "workers.call(own), output_tokens=4": "energy: output_tokens is the tokens of a call, but own has *",
    "backend.generate, ['x'], output_tokens=4": "energy(backend.generate, ...): leave out output_tokens, *",
    "late, output_tokens=4": "energy: a call of this function only makes a coroutine or generator; *",
    "lambda: late(), output_tokens=len": "energy: a call of this function only makes a coroutine or *",
}


def test_wrong_counts_are_one_line_or_the_traceback_of_the_users_function(
    quick: pytest.Pytester, read_report: Read
) -> None:
    without_torch(quick.path)
    tests = "".join(
        f"def test_{n}(energy, workers, backend): energy({each})\n" for n, each in enumerate(WRONG)
    )
    quick.makepyfile(
        f"""
import pytest
def f(x): return x
def own(output_tokens=1): return output_tokens
async def late(): pass
def test_raises(energy): energy(f, "x", output_tokens=lambda r: r.ids)
def test_raises_in_rank(energy, workers): energy(workers.call(f, "x"), output_tokens=lambda r: r.ids)
@pytest.mark.energy_options(warmup=1)
def test_early(energy): energy(f, "x", output_tokens=str)
{tests}"""
    )
    result = quick.runpytest("--energy-backend=transformers", "--energy-report")
    result.assert_outcomes(failed=len(WRONG) + 3)
    assert "calls.py" not in result.stdout.str(), "only frames of the test"
    result.stdout.fnmatch_lines(
        [
            "*energy(f, ?x?, output_tokens=lambda r: r.ids)",
            "E   AttributeError: 'str' object has no attribute 'ids'",
            "WorkerError: rank 0 of 1 (cpu, pid *): AttributeError: 'str' object has no attribute 'ids'",
            "Traceback (most recent call last):",
            "  File *, in <lambda>",
            "*energy(workers.call(f, ?x?), output_tokens=lambda r: r.ids)",
            "AttributeError: 'str' object has no attribute 'ids'",
            "LLEnergyError: energy: output_tokens of f returned 'x'; give the number *",
        ],
    )
    result.stdout.fnmatch_lines([f"*Error: {line}" for line in WRONG.values()])
    (early,) = (each for each in read_report()["records"] if each["id"].endswith("::test_early"))
    assert early["rounds"] == [], "it failed before any round"


def test_a_gate_compares_energy_per_token_but_not_other_work(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.makepyfile(
        """
        import os, time
        def test_it(energy):
            seconds, given, made = os.environ["WORK"].split()
            energy(time.sleep, float(seconds), output_tokens=int(made), input_tokens=lambda _: int(given))
        """
    )

    def run(work: str, *options: str) -> pytest.RunResult:
        monkeypatch.setenv("WORK", work)
        return quick.runpytest("--energy-rounds=4", *options)

    run("0.1 20 32", "--energy-save=main").assert_outcomes(passed=1)
    for metric, unit in {"energy_per_output_token_j": "mJ/token", "energy_j": "J"}.items():
        gate = ("--energy-compare=main", f"--energy-fail-on={metric}:3%")
        # Inconclusive while other processes use the CPU.
        twice = run("0.2 20 32", *gate, "--energy-inconclusive=fail")
        twice.assert_outcomes(failed=1)
        twice.stdout.re_match_lines([rf".*{unit}  \+(9[5-9]|10\d)\.\d%"])
        other = run("0.1 40 64", *gate)
        other.assert_outcomes(failed=1)
        words = "input tokens per iteration: 20 -> 40 (+100%); output tokens per iteration: 32 -> 64 (+100%)"
        assert words in " ".join(other.stdout.str().split())
