# SPDX-License-Identifier: Apache-2.0
"""Named windows on a real sampler: how they nest, end and fail."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_llenergy.energy import Measuring, Window, measure
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.nvml import open_nvml
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import MeterError

from ..nvml_sim import Board, MigInstance, World
from .waves import MS

pytestmark = pytest.mark.clock

Attach = Callable[[World], ModuleType]


@pytest.fixture
def world(tmp_path: Path, nvml_attach: Attach) -> World:
    made = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=20 * MS)])
    nvml_attach(made)
    return made


@contextmanager
def sampling(world: World) -> Iterator[Measuring]:
    selection = Selection(tuple(open_nvml(Targets((world.board(0).uuid,)))), ())
    with Measuring([LocalWindows(selection)]) as measuring:
        yield measuring


def divided_world(tmp_path: Path, nvml_attach: Attach) -> World:
    """Create a board of 60 W and one of 100 W that is divided into two MIG instances."""
    instances = (MigInstance("MIG-b", gpu_instance=1), MigInstance("MIG-c", gpu_instance=2))
    whole = Board(latch_ns=20 * MS)
    other = Board(power_w=100.0, latch_ns=20 * MS, mig_enabled=True, mig_instances=instances)
    made = World(tmp_path / "world", [whole, other])
    nvml_attach(made)
    return made


def truth(world: World, window: Window, index: int = 0) -> float:
    start_ns, end_ns = window.start_s * 1e9, (window.start_s + window.duration_s) * 1e9
    return world.true_energy_j(index, round(start_ns), round(end_ns))


def was_starved(window: Window) -> bool:
    """Return whether the machine kept the reader from running; test_sampler covers the flag."""
    return "doubtful" in [flag.name for flag in window.flags]


def check(world: World, window: Window) -> None:
    check_energy(world, window)
    assert was_starved(window) or window.flags == []


def check_energy(world: World, window: Window, index: int = 0) -> None:
    assert window.reason is None
    # A test that must never fail by chance allows four standard uncertainties.
    assert abs(window.energy_j - truth(world, window, index)) <= 4 * window.energy_u_j
    assert was_starved(window) or window.energy_u_j < 0.25 * window.energy_j
    (domain,) = window.by_domain.values()
    assert (domain.energy_j, domain.kind) == (window.energy_j, "measured")
    assert domain.low_j == pytest.approx(0.9 * window.energy_j - 15 * window.duration_s)


def fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise ZeroDivisionError


def test_nested_windows_are_measured_separately(world: World) -> None:
    with sampling(world) as energy:
        with energy.window("outer") as outer:
            time.sleep(0.1)
            world.set_power(0, 500.0)
            with energy.window("inner") as inner:
                time.sleep(0.15)
            world.set_power(0, 100.0)
            time.sleep(0.1)
        check(world, outer)
        check(world, inner)
    assert outer.start_s < inner.start_s
    assert inner.start_s + inner.duration_s < outer.start_s + outer.duration_s
    assert outer.energy_j > inner.energy_j


def test_overlapping_windows_are_measured_separately(world: World) -> None:
    with sampling(world) as energy:
        first, second = energy.window("first"), energy.window("second")
        first.__enter__()
        time.sleep(0.1)
        second.__enter__()
        world.set_power(0, 400.0)
        time.sleep(0.1)
        first.__exit__(None, None, None)
        time.sleep(0.1)
        second.__exit__(None, None, None)
        assert first.start_s < second.start_s < first.start_s + first.duration_s
        check(world, first)
        check(world, second)


def test_the_first_reading_is_not_taken_for_a_tick(world: World) -> None:
    # The value of the first reading is about 340 ms old.
    world.update(0, latch_ns=400 * MS, latch_phase_ns=time.monotonic_ns() + 60 * MS)
    with sampling(world) as energy:
        with energy.window("first") as window:
            time.sleep(1.3)
        check(world, window)


def test_an_exception_ends_the_window(world: World) -> None:
    with sampling(world) as energy:
        window = energy.window("broken")
        with pytest.raises(ZeroDivisionError), window:
            fail_after(0.1)
        assert window.ended
        check(world, window)


def test_an_open_window_has_no_numbers(world: World) -> None:
    with sampling(world) as energy, energy.window("load") as window:
        assert not window.ended
        for name in ("start_s", "duration_s", "energy_j", "energy_u_j", "by_domain", "flags", "record"):
            with pytest.raises(
                MeterError, match=r"^window 'load' has not ended; read it after the with block$"
            ):
                getattr(window, name)


def test_a_window_much_shorter_than_a_tick_has_none_to_all_of_what_the_board_may_draw(world: World) -> None:
    world.update(0, latch_ns=100 * MS)
    with sampling(world) as energy:
        time.sleep(0.35)
        # A window of 2 ms, retried if the sleep was too long, in a tick of 100 ms; then power changes.
        for _ in range(100):
            with energy.window("blink") as window:
                time.sleep(0.002)
            if window.duration_s < 0.01:
                break
        world.set_power(0, 500.0)
        time.sleep(0.4)
        assert 0 <= window.energy_j <= window.energy_u_j * math.sqrt(12)
        assert window.energy_u_j < 700 * window.duration_s
        assert window.energy_j - 2 * window.energy_u_j <= 0 <= 100 * window.duration_s
        names = [flag.name for flag in window.flags if flag.name != "doubtful"]
        assert names == ["imprecise"]


def test_a_counter_frozen_during_the_self_check_is_replaced_by_power(world: World) -> None:
    world.update(0, frozen=True)
    with sampling(world) as energy:
        time.sleep(0.3)
        with energy.window("frozen") as window:
            time.sleep(0.6)
    check_energy(world, window)
    # A busy host may add the flag doubtful.
    assert [flag.name for flag in window.flags][:2] == ["meter", "meter"]


def test_a_counter_that_stops_later_gives_a_reason_instead_of_zero(world: World) -> None:
    with sampling(world) as energy:
        world.update(0, frozen=True)
        time.sleep(0.1)
        with energy.window("frozen") as window:
            time.sleep(0.05)
        assert window.record.energy_j is None
        assert window.reason == f"nvml: gpu:{world.board(0).uuid} did not tick after the window"


def test_without_meters_a_window_has_its_duration_and_the_reasons() -> None:
    none = Selection((), ("nvml: no driver", "rapl: none"))
    with Measuring([LocalWindows(none)]) as energy, energy.window("bare") as window:
        time.sleep(0.02)
    assert window.duration_s >= 0.02
    assert window.record.energy_j is None
    assert window.reason == "nvml: no driver; rapl: none"


def test_windows_begin_and_end_by_name(world: World) -> None:
    with sampling(world) as energy:
        energy.begin("a")
        with pytest.raises(
            MeterError, match=r"^window 'a' is open already; end it first, or give another name$"
        ):
            energy.begin("a")
        time.sleep(0.1)
        with pytest.raises(MeterError, match=r"^no window 'b' is open; open: 'a'$"):
            energy.end("b")
        check(world, energy.end("a"))
    check(world, energy.total)


def test_an_open_window_cannot_be_entered_again(world: World) -> None:
    with sampling(world) as energy:
        window = energy.window("w").__enter__()
        with (
            pytest.raises(
                MeterError,
                match=r"^window 'w' is open already, until end\('w'\); make a new one with window\('w'\)$",
            ),
            window,
        ):
            pass


def test_async_code_can_await_the_energy_without_blocking(world: World) -> None:
    world.update(0, latch_ns=100 * MS)

    async def body() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        selection = Selection(tuple(open_nvml(Targets((world.board(0).uuid,)))), ())
        with Measuring([LocalWindows(selection)]) as energy:
            async with energy.window("async") as window:
                await asyncio.sleep(0.35)
            busy = asyncio.create_task(others())
            await window.settled()
            turns_while_waiting = turns
            busy.cancel()
            check(world, window)
            return turns_while_waiting

    assert asyncio.run(body()) > 1


class TestPlainScripts:
    def test_the_visible_boards_are_measured(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with measure() as energy:
            time.sleep(0.2)
        assert list(energy.total.by_domain) == [f"gpu:{world.board(0).uuid}"]
        check(world, energy.total)

    @pytest.mark.parametrize(
        ("value", "detail"),
        [
            ("", ""),
            ("-1", ""),
            ("7", " ('7' does not match exactly one GPU)"),
            ("MIG-gone", " ('MIG-gone' does not match exactly one GPU)"),
        ],
    )
    def test_hidden_boards_are_not_replaced_by_the_cpu(
        self, world: World, monkeypatch: pytest.MonkeyPatch, value: str, detail: str
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with pytest.raises(MeterError) as caught:
            measure()
        assert str(caught.value) == (
            f"CUDA_VISIBLE_DEVICES={value!r} allows no GPU{detail}, and the driver shows 1; measure(gpus=()) "
            "measures the CPU, measure(gpus=[UUID]) the named GPUs"
        )

    @pytest.mark.parametrize("value", ["MIG-b", "MIG-b,", "MIG-b,MIG-c"])
    def test_mig_instances_have_the_flagged_energy_of_their_board(
        self, tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        world = divided_world(tmp_path, nvml_attach)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with measure() as energy:
            time.sleep(0.3)
        uuid = world.board(1).uuid
        assert list(energy.total.by_domain) == [f"gpu:{uuid}"]
        check_energy(world, energy.total, index=1)
        (flag,) = (flag for flag in energy.total.flags if flag.name != "doubtful")
        assert (flag.name, flag.severity) == ("meter", "warning")
        assert flag.detail == (
            f"{uuid}: MIG instances have no energy counter: the joules are those of the whole board"
        )

    def test_a_divided_board_is_flagged_as_shared(
        self, tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = divided_world(tmp_path, nvml_attach)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with measure() as energy:
            time.sleep(0.3)
        assert list(energy.total.by_domain) == [f"gpu:{world.board(index).uuid}" for index in range(2)]
        assert [flag.name for flag in energy.total.flags if flag.name != "doubtful"] == ["meter"]

    def test_an_unknown_mig_instance_is_refused_by_name(self, tmp_path: Path, nvml_attach: Attach) -> None:
        divided_world(tmp_path, nvml_attach)
        with pytest.raises(MeterError) as caught:
            measure(["MIG-gone"], meters=["nvml"])
        assert str(caught.value) == (
            "no meter for GPUs MIG-gone: nvml: MIG-gone does not answer (Not Found); see nvidia-smi -L"
        )

    def test_ambiguous_device_numbers_are_refused(
        self, tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvml_attach(World(tmp_path / "world", [Board(name="L4"), Board(name="H100")]))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        with pytest.raises(MeterError, match=r"^CUDA_VISIBLE_DEVICES='1' counts the fastest GPU first"):
            measure()

    def test_an_estimate_is_flagged(self) -> None:
        with measure(gpus=(), meters=["estimate"]) as energy:
            time.sleep(0.3)
        assert "estimated" in [flag.name for flag in energy.total.flags]

    def test_require_measured_fails_without_a_measuring_meter(self, world: World) -> None:
        world.update(0, lost=True)
        with pytest.raises(MeterError, match=r"^no meter that measures .*\(GPU is lost\)"):
            measure(gpus=[world.board(0).uuid], require_measured=True)

    def test_measure_imports_neither_pytest_nor_heavy_libraries(self) -> None:
        script = (
            "import sys\nfrom pytest_llenergy.energy import measure\n"
            "with measure(gpus=(), meters=['estimate']) as energy:\n    sum(range(30_000_000))\n"
            "assert energy.total.energy_j > 0\n"
            "heavy = {'pytest', '_pytest', 'torch', 'numpy', 'sklearn', 'pandas', 'pynvml'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


def test_adjacent_short_windows_do_not_count_energy_twice(world: World) -> None:
    world.update(0, latch_ns=100 * MS)
    with sampling(world) as energy:
        for _ in range(4):
            time.sleep(0.4)
            world.set_power(0, 600.0)
            with energy.window("a") as first:
                time.sleep(0.02)
            with energy.window("b") as second:
                time.sleep(0.02)
            world.set_power(0, 100.0)
            time.sleep(0.4)
            for window in (first, second):
                if window.reason is None:
                    assert abs(window.energy_j - truth(world, window)) <= 3 * window.energy_u_j


def test_a_window_that_is_not_open_cannot_be_exited(world: World) -> None:
    with sampling(world) as energy:
        with pytest.raises(MeterError, match=r"^window 'w' is not open; enter it first, and leave it once$"):
            energy.window("w").__exit__(None, None, None)
        with energy.window("later") as later:
            time.sleep(0.1)
        assert later.energy_j > 0


def test_a_gpu_error_ends_the_window_and_does_not_hide_the_error_of_the_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=fail)
    with sampling(world) as energy:
        first, second = energy.begin("first"), energy.begin("second")
        with monkeypatch.context() as broken:
            broken.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
            with pytest.raises(RuntimeError, match="illegal memory access"):
                first.__exit__(None, None, None)
            second.__exit__(KeyError, KeyError("of the work"), None)
        assert first.ended
        assert second.ended


def test_closed_meters_cannot_be_started_again(world: World) -> None:
    with sampling(world) as energy:
        pass
    with pytest.raises(MeterError, match=r"^these meters were closed; open new ones with measure"):
        energy.start()
