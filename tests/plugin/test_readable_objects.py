# SPDX-License-Identifier: Apache-2.0
"""What print() shows of the objects of a test, and what a missing value does."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from pytest_llenergy.api import Run
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.window import Measuring, Window
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import LLEnergyError, MeterError
from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import DomainEnergy, Round
from pytest_llenergy.record.timeline import RequestTimeline

from ..compare.runs import round_of


def run_of(*rounds: Round) -> Run:
    return Run(list(rounds), compute_metrics(rounds, None), "result")


def test_a_run_is_one_line() -> None:
    shown = repr(run_of(*[round_of(each) for each in (10.0, 10.02, 9.97)]))
    assert shown == "<Run of 3 rounds: 5.00 ± 0.50 J, 625 ± 63 mJ/token, 1 s, 8 token/s>"
    assert str(run_of(round_of(10.0))) == "<Run of 1 round: 5 J, 625 mJ/token, 1 s, 8 token/s>"


def test_a_round_is_one_line_that_says_of_how_many_calls_it_is() -> None:
    one = round_of(14.4, energy_u_absolute_j=0.12, duration_s=2.1, iterations=1)
    twelve = msgspec.structs.replace(one, iterations=12)
    assert repr(twelve) == "<Round of 12 calls: 14.40 ± 0.12 J in 2.1 s (1.2 J per call)>"
    assert repr(one) == "<Round of 1 call: 14.40 ± 0.12 J in 2.1 s>"
    assert repr(round_of(None)) == "<Round of 2 calls: no energy (the counter stood still) in 2 s>"


def test_a_run_says_that_its_joules_are_estimated_or_missing() -> None:
    domain = DomainEnergy(energy_j=1.0, energy_u_j=0.1, kind="estimated")
    estimated = round_of(10.0, by_domain={"cpu:host": domain})
    assert repr(run_of(estimated)).endswith("8 token/s, joules estimated>")
    assert (
        repr(run_of(round_of(None)))
        == "<Run of 1 round: no joules (the counter stood still), 1 s, 8 token/s>"
    )


def test_a_missing_metric_raises_with_its_reason() -> None:
    run = run_of(round_of(None))
    with pytest.raises(LLEnergyError, match="energy_j has no value: the counter stood still"):
        assert run.energy_j < 1


@pytest.fixture
def unmeasured() -> Window:
    with (
        Measuring([LocalWindows(Selection((), ("nvml: no driver",)))]) as energy,
        energy.window("bare") as window,
    ):
        time.sleep(0.002)
    return window


def test_a_missing_window_energy_raises_with_its_reason(unmeasured: Window) -> None:
    for name in ("energy_j", "energy_u_j", "energy_u_absolute_j"):
        with pytest.raises(MeterError, match=f"window 'bare': {name} has no value: nvml: no driver"):
            assert getattr(unmeasured, name) < 1
    # A check without an exception, and what JSON has.
    assert unmeasured.reason == "nvml: no driver"
    assert unmeasured.record.energy_j is None
    assert msgspec.to_builtins(unmeasured.record)["energy_j"] is None
    assert repr(unmeasured).startswith("<Window 'bare': no joules in 0.00")
    assert repr(unmeasured).endswith(" s: nvml: no driver>")


def test_a_window_without_result_shows_its_state() -> None:
    with Measuring([LocalWindows(Selection((), ()))]) as energy:
        window = energy.window("later")
        assert repr(window) == "<Window 'later': not begun>"
        with window:
            assert str(window) == "<Window 'later': open>"


def test_leases_name_their_devices() -> None:
    boards = tuple(
        Board(uuid=f"GPU-{name}", name="NVIDIA H200", pci_bus_id=f"0000:0{name}:00.0") for name in "ab"
    )
    lease = Lease(devices=("GPU-a", "GPU-b"), boards=boards, indices=(0, 1))
    assert repr(lease) == "<Lease: NVIDIA H200 GPU-a, NVIDIA H200 GPU-b>"
    assert repr(Lease(devices=(CPU,))) == "<Lease: 1 CPU rank>"
    assert repr(Lease(devices=(CPU, CPU), fallback="cpu")) == "<Lease: 2 CPU ranks instead of GPUs>"


def test_results_of_backends_are_one_short_line() -> None:
    requests = [RequestTimeline(input_tokens=3, output_tokens=200)] * 8
    texts = ["a long text " * 100] * 8
    done = Generation(texts=texts, token_ids=[[1] * 200] * 8, requests=requests)
    assert repr(done).startswith("<Generation of 8 outputs, 1600 output tokens: 'a long text")
    assert len(repr(done)) < 100


TEST = """
import time
def test_run(energy):
    run = energy(time.sleep, 0.05)
    print(run)
    assert run.energy_j < 0
def test_window(energy_meter):
    with energy_meter("nap") as window:
        time.sleep(0.3)
    print(window)
"""


def test_print_and_failed_assertions_show_short_objects(quick: pytest.Pytester) -> None:
    quick.makepyfile(TEST)
    result = quick.runpytest("-rP")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines(
        [
            r"E +\+ +where \S+ = <Run of 2 rounds: .*J, 0\.0\d+ s>\.energy_j",
            r"<Window 'nap': (2\.9|3\.)\d+ ± \S+ J in 0\.3\d* s, measured>",
        ]
    )


@pytest.mark.parametrize("quiet", ["-q", "-qq"])
def test_quiet_runs_print_the_path_of_the_report(quick: pytest.Pytester, quiet: str) -> None:
    quick.makepyfile("import time\ndef test_it(energy):\n    energy(time.sleep, 0.01)\n")
    result = quick.runpytest(quiet, "--energy-report=out.json")
    lines: list[Any] = result.stdout.lines
    assert "energy report: out.json" in lines
    assert not [line for line in lines if "± u" in line]
    result = quick.runpytest(quiet, "--energy-report=none.json", "-k", "absent")
    result.stdout.fnmatch_lines(["energy report: no test was measured; *none.json was not written"])
