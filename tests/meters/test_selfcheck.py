# SPDX-License-Identifier: Apache-2.0
"""The verdict on a counter, from readings that are exact."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.selfcheck import (
    PROVISIONAL_S,
    CheckCache,
    CheckedBoard,
    CheckResult,
    Reading,
    check_counters,
    evaluate_readings,
    is_settled,
    read_boot_id,
)

MS = 1_000_000
Power = Callable[[float], float]
POLL_MS = 1.5


def steady(watts: float) -> Power:
    return lambda _time_s: watts


def energies(power: Power, seconds: float) -> list[float]:
    """True joules at every tenth of a millisecond."""
    total, values = 0.0, [0.0]
    for step in range(round(seconds * 10_000)):
        total += power((step + 0.5) * 1e-4) * 1e-4
        values.append(total)
    return values


def watch(
    power: Power,
    *,
    ticks_ms: list[float] | float = 100.0,
    seconds: float = 1.3,
    gain: float = 1.0,
    told_w: Power | None = None,
) -> list[Reading]:
    """Readings of a board with this power, whose counter ticks at ``ticks_ms`` and counts ``gain`` J a J."""
    truth = energies(power, seconds)
    if isinstance(ticks_ms, float):
        period_ms = ticks_ms
        ticks_ms = [0.7 + count * period_ms for count in range(int(seconds * 1000 / period_ms) + 1)]
    readings, latched_j, passed = [], 0.0, 0
    for poll in range(int(seconds * 1000 / POLL_MS)):
        now_ms = poll * POLL_MS
        while passed < len(ticks_ms) and ticks_ms[passed] <= now_ms:
            latched_j = gain * truth[round(ticks_ms[passed] * 10)]
            passed += 1
        watts = (told_w or power)(now_ms / 1000)
        readings.append(Reading(int(now_ms * MS), int(now_ms * MS) + 10_000, latched_j, watts))
    return readings


def without_power(readings: list[Reading]) -> list[Reading]:
    return [reading._replace(watts=None) for reading in readings]


@pytest.mark.parametrize("period_ms", [2.0, 20.0, 100.0, 250.0])
def test_the_period_of_the_ticks_is_found(period_ms: float) -> None:
    result = evaluate_readings(watch(steady(60.0), ticks_ms=period_ms))
    assert result.reason is None
    assert result.period_s == pytest.approx(period_ms / 1000, rel=0.01)
    assert result.jitter_s is not None
    assert result.jitter_s <= POLL_MS / 1000
    assert result.ratio == pytest.approx(1.0, abs=0.01)
    assert not result.continuous


def test_a_tick_that_was_missed_does_not_spoil_the_period() -> None:
    readings = [reading for reading in watch(steady(60.0)) if not 0.45e9 < reading.begin_ns < 0.65e9]
    result = evaluate_readings(readings)
    assert result.period_s == pytest.approx(0.1, rel=0.01)
    assert result.longest_s == pytest.approx(0.2, abs=0.06)
    assert result.reason is None


def test_jitter_is_told_apart_from_the_period() -> None:
    draw = random.Random(5)
    ticks_ms = [100.0 * count + draw.uniform(0, 20) for count in range(25)]
    result = evaluate_readings(watch(steady(60.0), ticks_ms=ticks_ms, seconds=2.5))
    gaps = sorted(after - before for before, after in pairwise(ticks_ms))
    assert result.period_s == pytest.approx(0.1, rel=0.02)
    assert result.jitter_s is not None
    assert 0.002 < result.jitter_s < 0.02
    assert result.longest_s == pytest.approx(gaps[-1] / 1000, abs=2 * POLL_MS / 1000)
    assert result.reason is None


def test_a_counter_that_always_moves_is_continuous() -> None:
    result = evaluate_readings(watch(steady(60.0), ticks_ms=0.5))
    assert result.continuous
    assert result.period_s == pytest.approx(POLL_MS / 1000, rel=0.01)


def test_a_frozen_counter_is_told_with_the_power_that_was_drawn() -> None:
    readings = watch(steady(60.0), ticks_ms=[1.0, 101.0])
    assert evaluate_readings(readings).reason == "stood still for 1.2 s while the board drew 60 W"
    assert evaluate_readings(without_power(readings)).reason == "stood still for 1.2 s"


def test_time_without_readings_is_no_standstill() -> None:
    readings = [
        reading for reading in watch(steady(60.0), seconds=2.5) if not 0.3e9 < reading.begin_ns < 1.9e9
    ]
    result = evaluate_readings(readings)
    assert result.reason is None
    assert result.still_s is not None
    assert result.still_s < 0.11


def test_a_counter_that_goes_backwards_is_told() -> None:
    readings = watch(steady(60.0))
    later = [reading._replace(energy_j=(reading.energy_j or 0.0) - 12) for reading in readings[500:]]
    assert evaluate_readings(readings[:500] + later).reason == "went backwards by 12 J"


def test_a_counter_that_disagrees_with_power_is_told_with_both_numbers() -> None:
    readings = watch(steady(327.0), gain=0.571, seconds=1.15)
    assert evaluate_readings(readings).reason == "counter reads 205 J, integrated power 360 J (-43 %)"


@pytest.mark.parametrize(("gain", "accepted"), [(0.93, False), (0.96, True), (1.04, True), (1.07, False)])
def test_five_percent_may_be_the_sensors(gain: float, accepted: bool) -> None:
    result = evaluate_readings(watch(steady(60.0), gain=gain))
    assert (result.reason is None) == accepted
    assert result.ratio == pytest.approx(gain, abs=0.005)


def test_polls_that_are_far_apart_leave_the_first_and_last_tick_open() -> None:
    readings = watch(steady(60.0), ticks_ms=700.0, gain=1.045)
    sparse = evaluate_readings(readings[::20])
    assert sparse.ratio == pytest.approx(1.06, abs=0.002)
    assert sparse.doubt == pytest.approx(0.03 / 0.69, rel=0.01)
    assert sparse.reason is None


def test_without_power_there_is_nothing_to_compare() -> None:
    result = evaluate_readings(without_power(watch(steady(60.0), gain=0.5)))
    assert (result.reason, result.ratio, result.doubt, result.mean_w) == (None, None, None, None)
    assert result.period_s == pytest.approx(0.1, rel=0.01)


def busy(seed: int) -> Power:
    """100 W or 500 W, changing at random every few tens of milliseconds."""
    draw = random.Random(seed)
    borders, time_s = [], 0.0
    while time_s < 3:
        time_s += draw.uniform(0.005, 0.1)
        borders.append((time_s, draw.choice((100.0, 500.0))))
    return lambda at_s: next(watts for border_s, watts in borders if at_s <= border_s)


def glimpsed(power: Power, phase_s: float) -> Power:
    """What a sensor tells that looks for one moment every 100 ms."""
    return lambda at_s: power(max(0.0, (at_s - phase_s) // 0.1 * 0.1 + phase_s))


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_board_under_a_part_time_sensor_is_given_the_benefit(seed: int) -> None:
    power = busy(seed)
    told_w = glimpsed(power, 0.01 * seed)
    honest = evaluate_readings(watch(power, seconds=2.4, told_w=told_w))
    assert honest.reason is None, honest
    assert honest.doubt is not None
    assert honest.doubt > 0.05
    assert not is_settled(honest)


@pytest.mark.parametrize("seed", range(4))
def test_a_counter_that_counts_thrice_is_found_out_on_a_busy_board_too(seed: int) -> None:
    power = busy(seed)
    assert "counter reads" in (evaluate_readings(watch(power, seconds=2.4, gain=3.0)).reason or "")


def test_power_that_is_told_late_is_not_held_against_the_counter() -> None:
    """500 W until just before the check, and a reading that is the mean of the last second."""
    ramp = lambda at_s: 60.0 + 440.0 * max(0.0, 1.0 - at_s)  # noqa: E731
    readings = watch(steady(60.0), told_w=ramp, seconds=1.1)
    assert "counter reads" in (evaluate_readings(readings, power_age_s=0.0).reason or "")
    assert evaluate_readings(readings, power_age_s=1.0).reason is None


def test_power_by_itself_tells_when_it_is_refreshed() -> None:
    told_w = lambda at_s: 60.0 + int(at_s * 10 + 0.001) % 3  # noqa: E731
    readings = [reading._replace(energy_j=None) for reading in watch(told_w)]
    result = evaluate_readings(readings)
    assert result.power_period_s == pytest.approx(0.1, rel=0.02)
    assert (result.ticks, result.period_s, result.reason) == (0, None, None)
    assert is_settled(result)
    assert evaluate_readings([reading._replace(watts=60.0) for reading in readings]).power_period_s is None


def test_the_check_ends_when_enough_was_seen_and_it_was_steady() -> None:
    readings = watch(steady(60.0), seconds=1.3)
    early = [reading for reading in readings if reading.end_ns < 0.95e9]
    assert not is_settled(evaluate_readings(early))
    assert is_settled(evaluate_readings(readings))
    assert not is_settled(evaluate_readings(watch(steady(60.0), ticks_ms=250.0)))
    assert is_settled(evaluate_readings(watch(steady(60.0), ticks_ms=[1.0])))


def test_boards_are_checked_side_by_side_and_not_mixed_up() -> None:
    def board(period_s: float, watts: float) -> Callable[[], tuple[float, float]]:
        return lambda: (time.monotonic() // period_s * period_s * watts, watts)

    polls = {"fast": board(0.05, 300.0), "slow": board(0.1, 60.0)}
    results = check_counters(polls, dict.fromkeys(polls, 0.1))
    assert results["fast"].period_s == pytest.approx(0.05, rel=0.2)
    assert results["slow"].period_s == pytest.approx(0.1, rel=0.2)
    assert [round(results[name].mean_w or 0) for name in polls] == [300, 60]
    assert {result.reason for result in results.values()} == {None}


def test_a_board_that_fails_meanwhile_ends_the_check() -> None:
    def poll() -> tuple[float, float]:
        raise MeterError("nvml: GPU is lost (GPU-a)")

    with pytest.raises(MeterError, match=r"^nvml: GPU is lost \(GPU-a\)$"):
        check_counters({"a": poll}, {"a": 0.1})


def test_one_reading_says_nothing() -> None:
    assert evaluate_readings([Reading(0, 1, 5.0, 60.0)]) == CheckResult(duration_s=0.0)
    assert not is_settled(evaluate_readings([Reading(0, 1, 5.0, 60.0)]))


BOARD = CheckedBoard(uuid="GPU-a", driver="580.1", boot="b", sources=["NVML_FI_DEV_ENERGY"])
FIT = CheckResult(duration_s=1.0, ticks=10, period_s=0.1)
UNFIT = CheckResult(duration_s=1.0, reason="stood still for 1.0 s")
BUSY = CheckResult(duration_s=2.5, ticks=25, period_s=0.1, ratio=1.2, doubt=0.4)


def the_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_result_is_found_again_by_another_process(tmp_path: Path) -> None:
    CheckCache(tmp_path / "new" / "meters").store(BOARD, FIT)
    assert CheckCache(tmp_path / "new" / "meters").load(BOARD) == FIT


@pytest.mark.parametrize(
    "changed", [{"uuid": "GPU-b"}, {"driver": "581"}, {"boot": "c"}, {"tool": "0"}, {"sources": ["other"]}]
)
def test_a_result_holds_for_what_it_was_found_under(tmp_path: Path, changed: dict[str, object]) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    assert cache.load(msgspec.structs.replace(BOARD, **changed)) is None
    assert cache.load(BOARD) == FIT


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"board": 3}', b"null"])
def test_a_damaged_file_is_a_miss_and_is_mended(tmp_path: Path, damage: bytes) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    the_file(tmp_path).write_bytes(damage)
    assert cache.load(BOARD) is None
    cache.store(BOARD, FIT)
    assert cache.load(BOARD) == FIT


def test_where_nothing_can_be_written_this_process_still_knows(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no directory")
    cache = CheckCache(occupied / "meters")
    assert cache.load(BOARD) is None
    cache.store(BOARD, FIT)
    assert CheckCache(occupied / "meters").load(BOARD) == FIT
    assert CheckCache(tmp_path / "elsewhere").load(BOARD) is None


def test_a_counter_that_was_rejected_or_hard_to_compare_gets_another_chance(tmp_path: Path) -> None:
    cache = CheckCache(tmp_path)
    for result, later in ((UNFIT, None), (BUSY, None), (FIT, FIT)):
        cache.store(BOARD, result)
        assert cache.load(BOARD) == result
        entry = json.loads(the_file(tmp_path).read_text())
        entry["checked_s"] = time.time() - PROVISIONAL_S - 1
        the_file(tmp_path).write_text(json.dumps(entry))
        assert cache.load(BOARD) == later


def test_the_directory_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLENERGY_CACHE_DIR", str(tmp_path))
    CheckCache().store(BOARD, FIT)
    assert the_file(tmp_path / "meters").suffix == ".json"


def test_the_boot_has_one_name() -> None:
    assert read_boot_id() == read_boot_id() != ""
