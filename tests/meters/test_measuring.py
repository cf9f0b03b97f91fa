# SPDX-License-Identifier: Apache-2.0
"""Named windows over a real sampler: how they nest, end and fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.measure.meter import Window
from pytest_llenergy.meters.nvml import NvmlMeter
from pytest_llenergy.meters.sampler import Sampler

from ..nvml_sim import Board, World
from .waves import MS

Attach = Callable[[World], ModuleType]


@pytest.fixture
def world(tmp_path: Path, nvml_attach: Attach) -> World:
    made = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=20 * MS)])
    nvml_attach(made)
    return made


@contextmanager
def sampling(world: World) -> Iterator[Sampler]:
    with Sampler([NvmlMeter([world.board(0).uuid])]) as sampler:
        yield sampler


def truth(world: World, window: Window) -> float:
    start_ns, end_ns = window.start_s * 1e9, (window.start_s + window.duration_s) * 1e9
    return world.true_energy_j(0, round(start_ns), round(end_ns))


def check(world: World, window: Window) -> None:
    assert window.energy_j is not None, window.record.reason
    assert window.energy_u_j is not None
    # One that may never fail gets four standard uncertainties.
    assert abs(window.energy_j - truth(world, window)) <= 4 * window.energy_u_j
    assert window.energy_u_j < 0.25 * window.energy_j
    (domain,) = window.by_domain.values()
    assert (domain.energy_j, domain.kind) == (window.energy_j, "measured")
    assert domain.low_j == pytest.approx(0.95 * window.energy_j)
    assert window.flags == []


def fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise ZeroDivisionError


def test_nested_windows(world: World) -> None:
    with sampling(world) as sampler:
        with Window("outer", sampler, ()) as outer:
            time.sleep(0.1)
            world.set_power(0, 500.0)
            with Window("inner", sampler, ()) as inner:
                time.sleep(0.15)
            world.set_power(0, 100.0)
            time.sleep(0.1)
        check(world, outer)
        check(world, inner)
    assert outer.start_s < inner.start_s
    assert inner.start_s + inner.duration_s < outer.start_s + outer.duration_s
    assert (outer.energy_j or 0) > (inner.energy_j or 0)


def test_overlapping_windows(world: World) -> None:
    with sampling(world) as sampler:
        first, second = Window("first", sampler, ()), Window("second", sampler, ())
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


def test_async_windows(world: World) -> None:
    async def body(sampler: Sampler) -> Window:
        async with Window("async", sampler, ()) as window:
            await asyncio.sleep(0.1)
        return window

    with sampling(world) as sampler:
        check(world, asyncio.run(body(sampler)))


def test_the_first_window_knows_that_the_first_reading_is_no_tick(world: World) -> None:
    # What the first reading says is some 340 ms old.
    world.update(0, latch_ns=400 * MS, latch_phase_ns=time.monotonic_ns() + 60 * MS)
    with sampling(world) as sampler:
        with Window("first", sampler, ()) as window:
            time.sleep(0.6)
        check(world, window)


def test_an_exception_ends_the_window(world: World) -> None:
    with sampling(world) as sampler:
        window = Window("broken", sampler, ())
        with pytest.raises(ZeroDivisionError), window:
            fail_after(0.1)
        assert window.ended
        check(world, window)


def test_an_open_window_has_no_numbers(world: World) -> None:
    with sampling(world) as sampler, Window("load", sampler, ()) as window:
        assert not window.ended
        for name in ("start_s", "duration_s", "energy_j", "energy_u_j", "by_domain", "flags", "record"):
            with pytest.raises(
                MeterError, match=r"^window 'load' has not ended; read it after the with block$"
            ):
                getattr(window, name)


def test_a_window_much_shorter_than_a_tick_has_no_energy(world: World) -> None:
    world.update(0, latch_ns=100 * MS)
    with sampling(world) as sampler:
        time.sleep(0.35)
        with Window("blink", sampler, ()) as window:
            pass
        assert window.energy_j is None
        (domain,) = window.by_domain.values()
        assert (domain.reason or "").startswith("not resolvable: ")
        assert [(flag.name, flag.severity) for flag in window.flags] == [("unmeasured", "warning")]


def test_a_frozen_counter_is_not_zero(world: World) -> None:
    world.update(0, frozen=True)
    with sampling(world) as sampler, Window("frozen", sampler, ()) as window:
        time.sleep(0.05)
    assert window.energy_j is None
    uuid = world.board(0).uuid
    assert window.record.reason == f"nvml: gpu:{uuid} did not tick before the window"


def test_without_meters_a_window_has_its_time_and_the_reasons() -> None:
    with Sampler([]) as sampler, Window("bare", sampler, ("nvml: no driver", "rapl: none")) as window:
        time.sleep(0.02)
    assert window.duration_s >= 0.02
    assert window.energy_j is None
    assert window.record.reason == "nvml: no driver; rapl: none"
