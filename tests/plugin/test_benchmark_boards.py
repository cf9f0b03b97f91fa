# SPDX-License-Identifier: Apache-2.0
"""Energy of benchmarks on simulated boards, whose power is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from .suites import ROOT, Read, by_name, dumped, energy, seconds

pytestmark = pytest.mark.clock

#: Each test sets the power of the board and notes the times of its rounds, so that their energy is known.
TRUE = """
    import os, time
    import pytest
    from tests.nvml_sim import World

    world = World.open(os.environ["NVML_SIM_WORLD"])

    @pytest.fixture
    def spans(benchmark):
        found = []
        yield found
        joules = [world.true_energy_j(0, start_ns, end_ns) for start_ns, end_ns in found]
        benchmark.extra_info["true_j"] = sum(joules) / len(joules)
        world.set_power(0, 100.0)

    def test_long(benchmark, spans):
        def work():
            start_ns = world.set_power(0, 500.0)
            time.sleep(0.2)
            world.set_power(0, 300.0)
            time.sleep(0.15)
            spans.append((start_ns, time.monotonic_ns()))
        def between():
            world.set_power(0, 150.0)
            time.sleep(0.1)
        benchmark.pedantic(work, setup=between, rounds=6)

    def test_short(benchmark, spans):
        def work():
            start_ns = world.set_power(0, 600.0)
            time.sleep(0.002)
            world.set_power(0, 200.0)
            time.sleep(0.002)
            spans.append((start_ns, time.monotonic_ns()))
        benchmark.pedantic(work, rounds=400)

    def test_busy(benchmark, spans):
        '''A loop that never lets go of the interpreter's lock by itself.'''
        def work():
            start_ns = world.set_power(0, 400.0)
            for _ in range(150_000):
                pass
            spans.append((start_ns, time.monotonic_ns()))
        benchmark(work)
        # Drop the calls for calibration and for the result: they are not rounds.
        del spans[: -len(benchmark.stats.stats.data) - 1], spans[-1]
"""


class TestBoards:
    """The benchmarked function sets the power of the board, which is read through NVML."""

    @pytest.fixture
    def run(
        self,
        pytester: pytest.Pytester,
        tmp_path: Path,
        nvml_children: Give,
        monkeypatch: pytest.MonkeyPatch,
        no_xdist: None,
    ) -> Callable[..., tuple[pytest.RunResult, World]]:
        def call(suite: str, boards: Sequence[Board], *args: str) -> tuple[pytest.RunResult, World]:
            world = nvml_children(World(tmp_path / "world", boards))
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            pytester.makepyfile(suite)
            return pytester.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider", *args), world

        return call

    @pytest.mark.parametrize("latch_ms", [20, pytest.param(100, marks=pytest.mark.slow)])
    @pytest.mark.slow
    def test_energy_agrees_with_the_simulated_energy(
        self,
        run: Callable[..., tuple[pytest.RunResult, World]],
        pytester: pytest.Pytester,
        read_report: Read,
        latch_ms: int,
    ) -> None:
        board = Board(power_w=100.0, latch_ns=latch_ms * 1_000_000)
        result, world = run(TRUE, [board], "--benchmark-json=out.json")
        result.assert_outcomes(passed=3)
        extra_info = {each["name"]: each["extra_info"] for each in dumped(pytester)}
        for name, record in by_name(read_report()).items():
            assert record["devices"] == [world.board(0).uuid]
            assert [meter["name"] for meter in record["meters"]] == ["nvml"]
            u_j = energy(record)["uncertainty"]
            true_j = extra_info[name]["true_j"]
            # The truth is a mean and the metric a median: a busy machine stretches a few rounds.
            rounds = [each for each in record["rounds"] if each["energy_j"] is not None]
            if not rounds and latch_ms == 100:
                # Windows of a second of work have few ticks of such a counter.
                assert record["rounds"][0]["reason"].startswith("not resolvable: ")
                continue
            mean_j = sum(each["energy_j"] for each in rounds) / sum(each["iterations"] for each in rounds)
            # Three standard uncertainties, since two would fail in 5 % of runs.
            assert abs(mean_j - true_j) <= 3 * u_j, (name, mean_j, u_j, true_j)
            if name != "test_busy":
                # The busy loop delays the sampler, as a busy machine does, which raises the uncertainty.
                assert u_j < 0.35 * true_j

    def test_all_visible_boards_are_leased_and_read(
        self,
        run: Callable[..., tuple[pytest.RunResult, World]],
        read_report: Read,
    ) -> None:
        suite = "import time\ndef test_it(benchmark):\n    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
        boards = [Board(power_w=watts) for watts in (100.0, 200.0, 400.0)]
        _, world = run(suite, boards)
        (record,) = read_report()["records"]
        assert record["devices"] == [world.board(index).uuid for index in range(3)]
        assert energy(record)["value"] == pytest.approx(700 * seconds(record), rel=0.02)

    @pytest.mark.slow
    def test_option_and_mark_select_boards(
        self, run: Callable[..., tuple[pytest.RunResult, World]], read_report: Read
    ) -> None:
        suite = (
            "import pytest, time\ndef test_chosen(benchmark):\n"
            "    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
            "@pytest.mark.gpus(1, name='L4')\ndef test_marked(benchmark, gpus):\n"
            "    benchmark.pedantic(time.sleep, (0.3,), rounds=4)\n"
        )
        boards = [Board(power_w=100.0), Board(power_w=30.0, name="NVIDIA L4"), Board(power_w=400.0)]
        _, world = run(suite, boards, "--energy-gpus=1,2")
        records = by_name(read_report())
        assert records["test_chosen"]["devices"] == [world.board(index).uuid for index in (1, 2)]
        chosen, marked = records["test_chosen"], records["test_marked"]
        assert energy(chosen)["value"] == pytest.approx(430 * seconds(chosen), rel=0.02)
        assert records["test_marked"]["devices"] == [world.board(1).uuid]
        assert energy(marked)["value"] == pytest.approx(30 * seconds(marked), rel=0.02)
