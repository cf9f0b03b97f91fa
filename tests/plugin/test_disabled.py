# SPDX-License-Identifier: Apache-2.0
"""``--energy-disable``, ``--energy-skip``, ``--energy-only``, and suites without the plugin."""

from __future__ import annotations

import re

import pytest

from ..conftest import TEN_WATTS
from ..docs.pages import ROOT, blocks
from ..docs.project import QUICK, set_up

NOTHING = "--energy-disable: nothing was measured"

#: A meter that cannot be opened, in the place of the only one that the run may use.
BROKEN_METER = TEN_WATTS.replace("lambda targets: [TenWatts()]", "lambda targets: 1 / 0")

ONCE = """
import os
import pytest

def call(path):
    with open(path, "a") as file:
        file.write("x")
    return os.getpid()

def test_in_process(energy):
    run = energy(call, "in_process")
    assert run.result == os.getpid()
    assert all(each.energy_j < 0 for each in run.rounds)
    pytest.fail("not reached")

@pytest.mark.energy_gate(budget="1 nJ")
def test_pedantic(energy):
    seen = []
    energy.pedantic(
        seen.append, setup=lambda: seen.append(1) or ((2,), {}), teardown=lambda _: seen.append(3), rounds=5
    )
    assert seen == [1, 2, 3]

@pytest.mark.gpus(2, fallback="cpu")
def test_ranks(energy, workers, tmp_path):
    run = energy(workers.call(call, str(tmp_path / "ranks")))
    assert len(set(run.result)) == 2 and os.getpid() not in run.result
    assert (tmp_path / "ranks").read_text() == "xx"
    run.metrics["mean_power_w"]
    pytest.fail("not reached")

def test_window(energy_meter):
    with energy_meter("load") as window:
        call("window")
    assert window.duration_s > 0
    assert (window.record.energy_j, window.reason) == (None, "--energy-disable: nothing was measured")
    assert window.energy_j < 1
    pytest.fail("not reached")

def test_asked_for_late(request):
    request.getfixturevalue("energy")(call, "late")

def test_wrong_result(energy):
    assert energy(lambda: 1).result == 2
"""


@pytest.mark.usefixtures("few_plugins")
@pytest.mark.parametrize(
    "options", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_disabled_work_runs_once_and_opens_no_meter(pytester: pytest.Pytester, options: list[str]) -> None:
    pytester.makeconftest(BROKEN_METER)
    # Both would be refused on the command line.
    pytester.makeini("[pytest]\nenergy_report = energy.json\nenergy_save = main\nenergy_require = measured\n")
    pytester.makepyfile(ONCE)
    result = pytester.runpytest("--energy-disable", "--energy-meter=ten-watts", "-q", "-rs", *options)
    result.assert_outcomes(passed=2, skipped=3, failed=1)
    assert result.stdout.str().count(NOTHING) >= 3
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    result.stdout.no_fnmatch_line("*energy report*")
    result.stdout.no_fnmatch_line("*= energy =*")
    assert [(pytester.path / name).read_text() for name in ("in_process", "window", "late")] == ["x"] * 3
    assert not {"energy.json", ".llenergy"} & {path.name for path in pytester.path.iterdir()}


def test_the_test_of_the_readme_is_skipped_at_its_energy(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, no_xdist: None
) -> None:
    set_up(pytester, monkeypatch)
    code = next(each.code for each in blocks(ROOT / "README.md") if each.language == "python")
    more = """
    energy.metric("accuracy", [1.0], better="more")
    with pytest.raises(AttributeError):
        run._no_metric
    run.energy_j
    pytest.fail("not reached")
"""
    scored = code.replace("test_decode", "test_scored").replace("    assert run.energy", f"{more}    #")
    pytester.makepyfile(test_readme=code, test_scored=scored)
    files = ["test_readme.py", "test_scored.py"]
    result = pytester.runpytest_subprocess(*files, *QUICK.split(), "--energy-disable", "-q", "-rs", "-n", "2")
    result.assert_outcomes(skipped=4)
    assert len(re.findall(f"SKIPPED .*{NOTHING}", result.stdout.str())) == 2


MIXED = """
import unittest, pytest
def test_energy(energy): energy(sum, [1])
def test_meter(energy_meter):
    with energy_meter("x"): pass
def test_late(request): request.getfixturevalue("energy")(sum, [1])
def test_plain(): pass
class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def measure(self, energy): self.energy = energy
    def test_of_unittest(self): self.energy(sum, [1])
    def test_other(self): self.energy(sum, [1])
"""


@pytest.mark.usefixtures("few_plugins")
@pytest.mark.parametrize(
    "options", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_skip_and_only(quick: pytest.Pytester, options: list[str]) -> None:
    quick.makepyfile(MIXED)
    skipped = quick.runpytest("--energy-skip", "-q", "-rs", *options)
    skipped.assert_outcomes(passed=1, skipped=5)
    skipped.stdout.fnmatch_lines(["SKIPPED*--energy-skip: the test measures energy"])
    skipped.stdout.no_fnmatch_line("*= energy =*")
    only = quick.runpytest("--energy-only", "--energy-report", "-rs", *options)
    # What a test asks for late is not known beforehand.
    only.assert_outcomes(passed=4, skipped=2)
    only.stdout.fnmatch_lines(["SKIPPED*--energy-only: the test measures no energy"])


def test_benchmarks_count_where_they_are_measured(quick: pytest.Pytester, no_xdist: None) -> None:
    pytest.importorskip("pytest_benchmark")
    quick.makepyfile("def test_it(benchmark): benchmark(sum, [1])\ndef test_plain(): pass")
    few = ("--benchmark-max-time=0.1", "--benchmark-min-rounds=1")
    quick.runpytest("--energy-only", *few).assert_outcomes(skipped=2)
    quick.runpytest("--energy-only", "--energy-report", *few).assert_outcomes(passed=1, skipped=1)
    disabled = quick.runpytest("--energy-disable", *few)
    disabled.assert_outcomes(passed=2)
    disabled.stdout.fnmatch_lines(["*benchmark: 1 tests*"])


def test_outputs_in_addopts_are_for_the_runs_that_measure(quick: pytest.Pytester) -> None:
    quick.makepyfile(MIXED)
    quick.makeini("[pytest]\naddopts = --energy-report\n")
    quick.runpytest("--energy-disable", "-n", "2")
    assert not (quick.path / "energy.json").exists()


@pytest.mark.slow
def test_lines_of_the_page_run_a_suite_without_the_plugin(quick: pytest.Pytester) -> None:
    (lines,) = (
        each.code for each in blocks(ROOT / "docs" / "writing-tests.md") if "WithoutEnergy" in each.code
    )
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.gpus(1, fallback="cpu")
        @pytest.mark.energy_options(rounds=1)
        def test_measured(energy, prompts): assert energy(len, prompts).energy_j > 0
        @pytest.mark.gpus(1, fallback="cpu")
        def test_backend(backend, energy): pass
        def test_plain(): pass
        """
    )
    quick.makeini("[pytest]\n")
    quick.makeconftest(lines)
    without = quick.runpytest("-p", "no:llenergy", "--strict-markers", "-rs")
    without.assert_outcomes(passed=1, skipped=2)
    without.stdout.fnmatch_lines(["SKIPPED*: needs pytest-llenergy"])
    # Where the plugin is there, its fixtures measure.
    quick.makeconftest(TEN_WATTS + lines)
    result = quick.runpytest("--strict-markers", "-k", "measured", "--energy-meter=ten-watts", "-rs")
    assert (result.ret, result.parseoutcomes()["passed"]) == (0, 1)
    result.stdout.fnmatch_lines(["*= energy =*", "test_measured*"])
