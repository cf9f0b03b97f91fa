# SPDX-License-Identifier: Apache-2.0
"""Marks are checked at collection, and none is without effect."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.plugin.marks import MARKS

from ..ranks.no_torch import without_torch

Read = Callable[..., dict[str, Any]]


def test_budget_fails_in_the_call_phase(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import time, pytest
        @pytest.mark.energy_gate(budget="100 J")
        def test_within(energy):
            energy(time.sleep, 0.1)
        @pytest.mark.energy_gate(budget="500 mJ")
        def test_over(energy):
            energy(time.sleep, 0.1)
        @pytest.mark.xfail(strict=True)
        @pytest.mark.energy_gate(budget="500 mJ")
        def test_expected(energy):
            energy(time.sleep, 0.1)
        @pytest.mark.energy_gate(metric="energy_per_output_token_j", budget="1 J")
        def test_not_had(energy):
            energy(time.sleep, 0.1)
        """
    )
    result = quick.runpytest("--energy-report", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "energy_gate: energy_j is * ± *J, over the budget of 500 mJ",
            "energy_gate: energy_per_output_token_j has no value (*), so its budget cannot be checked",
        ]
    )
    assert 'failure message="Failed: energy_gate' in (quick.path / "junit.xml").read_text()
    assert [record["status"] for record in read_report()["records"]] == ["measured"] + ["failed"] * 3


def test_mark_without_effect_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_gate="""
        import pytest
        @pytest.mark.energy_gate(budget="1 J")
        def test_it(energy_meter): pass
        """,
        test_gpus="""
        import pytest
        @pytest.mark.gpus(2)
        def test_it(): assert 0, "ran without GPUs"
        """,
    )
    gate = pytester.runpytest("test_gate.py")
    assert gate.ret == pytest.ExitCode.INTERRUPTED
    assert "energy_gate checks what energy(...) measures, but the test does" in gate.stdout.str()
    pytester.runpytest_subprocess("test_gpus.py").assert_outcomes(skipped=1)


#: Marks, and why they are refused.
INVALID = {
    "gpus(nmber=2)": "gpus: got an unexpected keyword argument 'nmber' (it takes: n, name, ",
    "gpus(1, name='')": "name is '', needs a part of the product name, such as \"H200\"",
    "parallel(data=2, placement=0)": "parallel: placement is 0, needs a whole number",
    "energy_gate(metric='joules', budget='5 J')": (
        "joules is not built in, and a budget cannot limit a custom metric; use assert in the test"
    ),
    "energy_gate(metric=['energy_j'], threshold='3%')": (
        "metric is ['energy_j'], needs one metric name, such as metric=\"energy_j\""
    ),
    "energy_gate(threshold='3 J')": "invalid threshold '3 J' of energy_j; expected a percentage, such as ",
    "energy_gate(metric='peak_memory_bytes', threshold='3%')": (
        "peak_memory_bytes has one value per test and cannot be compared; limit it with a budget"
    ),
}


def test_invalid_mark_is_a_collection_error(quick: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.mark.{}\ndef test_it(energy): pass\n"
    quick.makepyfile(**{f"test_{number}": source.format(mark) for number, mark in enumerate(INVALID)})
    result = quick.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    shown = result.stdout.str().replace("\nE", "")
    assert [message for message in INVALID.values() if message not in shown] == []


def test_gate_of_a_parameter_overrides_that_of_its_function(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        import time, pytest
        @pytest.mark.energy_gate(budget="500 mJ")
        @pytest.mark.parametrize("i", [pytest.param(0, marks=pytest.mark.energy_gate(budget="100 J")), 1])
        def test_it(energy, i): energy(time.sleep, 0.1)
        """
    )
    quick.runpytest().assert_outcomes(passed=1, failed=1)


def test_marks_are_registered(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.gpus(n=1, *, name=None, memory=None, *): lease n GPUs *",
            "@pytest.mark.parallel(*, data=1, tensor=1, pipeline=1, placement=1): degrees *",
            "@pytest.mark.energy_gate(*, metric=None, budget=None, threshold=None): fail the test *",
        ]
    )


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: mark.__name__)
def test_help_of_a_mark_begins_with_its_signature(mark: Callable[..., Any]) -> None:
    taken = inspect.signature(mark)
    bare = [each.replace(annotation=each.empty) for each in taken.parameters.values()]
    signature = taken.replace(parameters=bare, return_annotation=taken.empty)
    assert str(mark.__doc__).startswith(f"{mark.__name__}{signature}: ")


def test_gpus_mark_without_gpus_skips_with_the_reason(pytester: pytest.Pytester, read_report: Read) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.gpus(2)\ndef test_it(energy): energy(int)\n")
    # In a separate process, since another test may have loaded a simulated NVML.
    result = pytester.runpytest_subprocess("--energy-report", "-rs")
    result.assert_outcomes(skipped=1)
    reason = read_report()["records"][0]["reason"]
    assert reason.startswith("gpus(2): this host has no GPU (NVML: ")
    result.stdout.fnmatch_lines([f"*{reason}"])


@pytest.mark.parametrize("xdist", [[], ["-n1"]], ids=["here", "in a worker"])
def test_degrees_that_contradict_devices_are_a_collection_error(
    quick: pytest.Pytester, xdist: list[str]
) -> None:
    if xdist:
        pytest.importorskip("xdist")
    quick.makepyfile(
        "import pytest\n@pytest.mark.parametrize('i', [0, 1])\n@pytest.mark.gpus(2)\n"
        "@pytest.mark.parallel(tensor=4)\ndef test_it(workers, i): pass\ndef test_good(): pass\n"
    )
    result = quick.runpytest(*xdist)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_it: @pytest.mark.parallel(tensor=4) needs 4 devices and the lease *"]
    )


def test_degrees_are_checked_with_marks_of_parameters_and_hooks(quick: pytest.Pytester) -> None:
    without_torch(quick.path)
    conftest = quick.path / "conftest.py"
    hook = (
        "\nimport pytest\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
        "        if 'hooked' in item.name:\n"
        "            item.add_marker(pytest.mark.gpus(2, fallback='cpu'))\n"
    )
    conftest.write_text(conftest.read_text() + hook)
    quick.makepyfile(
        """
        import pytest
        TWO = pytest.mark.gpus(2, fallback="cpu")
        @pytest.mark.parallel(data=2)
        @pytest.mark.parametrize("i", [pytest.param(0, marks=TWO)])
        def test_parameter(workers, i): pass
        @pytest.mark.parallel(data=2)
        def test_hooked(workers): pass
        @pytest.mark.parallel(data=2)
        @pytest.mark.parametrize("i", [pytest.param(0, marks=TWO)])
        def test_energy(energy, i): assert len(energy(int).result) == 2
        """
    )
    quick.runpytest().assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("marks", "fixtures"),
    [
        ("parallel(tensor=2)", "energy"),
        ("parallel(tensor=2)", ""),
        ("gpus(2, fallback='cpu')\n@pytest.mark.parallel(tensor=2)", "energy_meter"),
    ],
)
def test_degrees_without_ranks_are_a_collection_error(
    quick: pytest.Pytester, marks: str, fixtures: str
) -> None:
    quick.makepyfile(f"import pytest\n@pytest.mark.{marks}\ndef test_it({fixtures}): pass\n")
    result = quick.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*::test_it: @pytest.mark.parallel divides the work of a test among ranks*"])
