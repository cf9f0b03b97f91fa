# SPDX-License-Identifier: Apache-2.0
"""Measuring leaves pytest-benchmark's calibration and rounds as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from ..conftest import TEN_WATTS
from .suites import SHORT, WATTS, Read, by_name, dumped, energy, seconds

pytestmark = [pytest.mark.clock, pytest.mark.usefixtures("no_xdist")]

#: Notes in extra_info when the test began, when its function was called, and the threads during the call.
NOTES = """
    import threading, time
    import pytest

    @pytest.fixture
    def notes(benchmark):
        calls = []
        benchmark.extra_info["begin"] = time.monotonic()
        yield lambda: calls.append(time.monotonic())
        benchmark.extra_info |= {"calls": calls, "end": time.monotonic()}

    def test_first(benchmark, notes):
        benchmark.extra_info["body"] = time.monotonic()
        benchmark(lambda: (notes(), time.sleep(0.01)))

    def test_second(benchmark, notes):
        benchmark.extra_info["body"] = time.monotonic()
        benchmark(lambda: (notes(), time.sleep(0.01)))

    def test_threads(benchmark):
        names = set()
        def work():
            names.update(each.name for each in threading.enumerate())
        benchmark(work)
        benchmark.extra_info["threads"] = sorted(names)
"""

#: Longer than a busy machine holds up a process.
GAP_S = 1.2
TICK_S = GAP_S / 3


@pytest.fixture
def notes(quick: pytest.Pytester) -> Callable[..., dict[str, dict[str, object]]]:
    """Return a function that runs the suite and returns the notes of each test."""

    def run(*args: str) -> dict[str, dict[str, object]]:
        quick.makepyfile(NOTES)
        # A gap lasts a few ticks.
        slow = TEN_WATTS.replace("update_period_s=0.001", f"update_period_s={TICK_S}")
        slow = slow.replace("max_age_s=0.001", "max_age_s=None")
        quick.makeconftest(slow.replace("time.monotonic()", f"(time.monotonic() // {TICK_S} * {TICK_S})"))
        options = ("--benchmark-json=out.json", *SHORT)
        quick.runpytest("--energy-report", *options, *args).assert_outcomes(passed=3)
        return {each["name"]: each["extra_info"] for each in dumped(quick)}

    return run


def test_one_gap_per_benchmark_lies_between_its_rounds_and_its_last_call(
    notes: Callable[..., dict[str, dict[str, float]]], read_report: Read
) -> None:
    """And none between set-up and calibration. The last call leaves the caches as without the gap."""
    found = notes()
    for name in ("test_first", "test_second"):
        calls: list[float] = found[name]["calls"]  # type: ignore[assignment]
        assert calls[0] - found[name]["begin"] < GAP_S, name
        assert calls[-1] - calls[-2] >= GAP_S
        assert max(b - a for a, b in pairwise(calls[:-1])) < GAP_S
    assert found["test_second"]["begin"] - found["test_first"]["end"] < GAP_S
    for record in by_name(read_report()).values():
        # Ticks that a busy machine reads late make it uncertain.
        idle_w, u_w = (record["rounds"][0][f"idle_power_{name}w"] for name in ("", "u_"))
        assert idle_w == pytest.approx(WATTS, abs=0.05 * WATTS + 3 * u_w)
        assert GAP_S <= record["times"]["gaps_s"] < 2 * GAP_S


def test_estimate_needs_no_gap_and_no_thread(notes: Callable[..., dict[str, dict[str, float]]]) -> None:
    found = notes("--energy-meter=estimate")
    calls: list[float] = found["test_first"]["calls"]  # type: ignore[assignment]
    assert calls[-1] - calls[-2] < GAP_S
    threads: list[str] = found["test_threads"]["threads"]  # type: ignore[assignment]
    assert "llenergy-sampler" not in threads


def test_estimate_neither_sleeps_nor_reads_more_than_before_and_after_short_rounds(
    quick: pytest.Pytester,
) -> None:
    quick.makepyfile(
        """
        import time
        from pytest_llenergy.energy.meters.estimate import EstimateMeter

        def test_call(benchmark, monkeypatch):
            slept, readings, read = [], [], EstimateMeter.read
            monkeypatch.setattr(time, "sleep", slept.append)
            monkeypatch.setattr(EstimateMeter, "read", lambda meter: readings.append(0) or read(meter))
            benchmark.pedantic(sum, (range(20),), rounds=20)
            # One before the rounds and two after them.
            assert (slept, len(readings)) == ([], 3)
        """
    )
    quick.runpytest("--energy-report", "--energy-meter=estimate", *SHORT).assert_outcomes(passed=1)


def test_rounds_of_microseconds_are_estimated(quick: pytest.Pytester, read_report: Read) -> None:
    """The loop of pytest-benchmark takes as long as such a round, but to a model of CPU time it is alike."""
    quick.makepyfile(
        """
        def test_call(benchmark):
            benchmark.pedantic(sum, (range(20),), rounds=3000)
        """
    )
    quick.runpytest("--energy-report", "--energy-meter=estimate", *SHORT).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["status"] == "measured", record["reason"]
    # On a busy machine, rounds wait for a CPU, which the estimate does not count.
    wall_j = 3.5 * seconds(record)
    assert 0.1 * wall_j < energy(record)["value"] < 1.5 * wall_j


def test_meters_stay_open_from_one_benchmark_to_the_next(quick: pytest.Pytester) -> None:
    quick.makeconftest(
        (quick.path / "conftest.py").read_text()
        + "\nimport json\nopened = []\n"
        + "class Counted(TenWatts):\n"
        + "    def __init__(self):\n        opened.append('open')\n"
        + "    def close(self):\n        opened.append('close')\n"
        + "def pytest_llenergy_meters(config):\n"
        + "    return [MeterSpec('ten-watts', 'measured', lambda targets: [Counted()])]\n"
        + "def pytest_unconfigure(config):\n"
        + "    open('opened.json', 'w').write(json.dumps(opened))\n"
    )
    quick.makepyfile(
        """
        import time
        def test_one(benchmark):
            benchmark(time.sleep, 0.002)
        def test_two(benchmark):
            benchmark(time.sleep, 0.002)
        def test_other():
            pass
        def test_three(benchmark):
            benchmark(time.sleep, 0.002)
        """
    )
    quick.runpytest("--energy-report", *SHORT).assert_outcomes(passed=4)
    opened = json.loads((quick.path / "opened.json").read_text())
    assert opened == ["open", "close"] * 2
