# SPDX-License-Identifier: Apache-2.0
"""The self-check of counters, on exact readings."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.energy import selfcheck
from pytest_llenergy.energy.selfcheck import (
    PROVISIONAL_S,
    CheckCache,
    CheckedBoard,
    CheckResult,
    Reading,
    check_counters,
    evaluate_readings,
)
from pytest_llenergy.errors import MeterError

MS = 1_000_000
Power = Callable[[float], float]
POLL_MS = 1.5


def steady(watts: float) -> Power:
    return lambda _time_s: watts


def cumulative_energy(power: Power, seconds: float) -> list[float]:
    """Return the true energy at every tenth of a millisecond."""
    total, values = 0.0, [0.0]
    for step in range(round(seconds * 10_000)):
        total += power((step + 0.5) * 1e-4) * 1e-4
        values.append(total)
    return values


def record_readings(
    power: Power,
    *,
    ticks_ms: list[float] | float = 100.0,
    seconds: float = 1.3,
    gain: float = 1.0,
    reported_w: Power | None = None,
) -> list[Reading]:
    """Read a board whose counter ticks at ``ticks_ms`` (or with that period) and counts ``gain`` J per J."""
    truth = cumulative_energy(power, seconds)
    if isinstance(ticks_ms, float):
        period_ms = ticks_ms
        ticks_ms = [0.7 + count * period_ms for count in range(int(seconds * 1000 / period_ms) + 1)]
    readings, latched_j, passed = [], 0.0, 0
    for poll in range(int(seconds * 1000 / POLL_MS)):
        now_ms = poll * POLL_MS
        while passed < len(ticks_ms) and ticks_ms[passed] <= now_ms:
            latched_j = gain * truth[round(ticks_ms[passed] * 10)]
            passed += 1
        watts = (reported_w or power)(now_ms / 1000)
        readings.append(Reading(int(now_ms * MS), int(now_ms * MS) + 10_000, latched_j, watts))
    return readings


def without_power(readings: list[Reading]) -> list[Reading]:
    return [reading._replace(watts=None) for reading in readings]


@pytest.mark.parametrize("period_ms", [2.0, 20.0, 100.0, 250.0])
def test_the_period_of_the_ticks_is_found(period_ms: float) -> None:
    result = evaluate_readings(record_readings(steady(60.0), ticks_ms=period_ms))
    assert result.reason is None
    assert result.period_s == pytest.approx(period_ms / 1000, rel=0.01)
    assert result.ratio == pytest.approx(1.0, abs=0.01)
    assert not result.continuous


def test_jitter_does_not_change_the_period() -> None:
    draw = random.Random(5)
    ticks_ms = [100.0 * count + draw.uniform(0, 20) for count in range(25)]
    result = evaluate_readings(record_readings(steady(60.0), ticks_ms=ticks_ms, seconds=2.5))
    assert result.period_s == pytest.approx(0.1, rel=0.02)
    assert result.reason is None


def test_a_counter_that_always_moves_is_continuous() -> None:
    result = evaluate_readings(record_readings(steady(60.0), ticks_ms=0.5))
    assert result.continuous
    assert result.period_s == pytest.approx(POLL_MS / 1000, rel=0.01)


def test_a_frozen_counter_is_rejected_with_the_power_drawn() -> None:
    readings = record_readings(steady(60.0), ticks_ms=[1.0, 101.0])
    assert evaluate_readings(readings).reason == "stood still for 1.2 s while the board drew 60 W"
    assert evaluate_readings(without_power(readings)).reason == "stood still for 1.2 s"


def test_time_without_readings_does_not_count_as_standstill() -> None:
    readings = [
        reading
        for reading in record_readings(steady(60.0), seconds=2.5)
        if not 0.3e9 < reading.begin_ns < 1.9e9
    ]
    assert evaluate_readings(readings).reason is None


def test_a_counter_that_goes_backwards_is_rejected() -> None:
    readings = record_readings(steady(60.0))
    later = [reading._replace(energy_j=(reading.energy_j or 0.0) - 12) for reading in readings[500:]]
    assert evaluate_readings(readings[:500] + later).reason == "went backwards by 12 J"


def test_a_counter_that_disagrees_with_power_is_rejected_with_both_numbers() -> None:
    readings = record_readings(steady(327.0), gain=0.571, seconds=1.15)
    assert evaluate_readings(readings).reason == "counter reads 205 J, integrated power 360 J (-43 %)"


@pytest.mark.parametrize(("gain", "accepted"), [(0.93, False), (0.96, True), (1.04, True), (1.07, False)])
def test_a_disagreement_of_five_percent_is_tolerated(gain: float, accepted: bool) -> None:
    result = evaluate_readings(record_readings(steady(60.0), gain=gain))
    assert (result.reason is None) == accepted
    assert result.ratio == pytest.approx(gain, abs=0.005)


def test_sparse_polls_make_the_first_and_last_tick_uncertain() -> None:
    readings = record_readings(steady(60.0), ticks_ms=700.0, gain=1.045)
    sparse = evaluate_readings(readings[::20])
    assert sparse.ratio == pytest.approx(1.06, abs=0.002)
    assert sparse.ratio_margin == pytest.approx(0.03 / 0.69, rel=0.01)
    assert sparse.reason is None


def test_without_power_the_counter_is_not_compared() -> None:
    result = evaluate_readings(without_power(record_readings(steady(60.0), gain=0.5)))
    assert (result.reason, result.ratio, result.ratio_margin, result.mean_w) == (None, None, None, None)
    assert result.period_s == pytest.approx(0.1, rel=0.01)


def test_a_power_reading_that_failed_once_is_no_pass() -> None:
    readings = record_readings(steady(60.0), gain=0.5)
    readings[100] = readings[100]._replace(watts=None)
    reason = evaluate_readings(readings).reason
    assert reason is not None
    assert reason.endswith("(-50 %)")


def busy(seed: int) -> Power:
    """Return power that changes at random between 100 W and 500 W every few tens of milliseconds."""
    draw = random.Random(seed)
    borders, time_s = [], 0.0
    while time_s < 3:
        time_s += draw.uniform(0.005, 0.1)
        borders.append((time_s, draw.choice((100.0, 500.0))))
    return lambda at_s: next(watts for border_s, watts in borders if at_s <= border_s)


def sampled_every_100_ms(power: Power, phase_s: float) -> Power:
    """Return the readings of a sensor that samples one moment every 100 ms."""
    return lambda at_s: power(max(0.0, (at_s - phase_s) // 0.1 * 0.1 + phase_s))


@pytest.mark.parametrize("seed", range(8))
def test_a_part_time_sensor_does_not_reject_the_counter_of_a_busy_board(seed: int) -> None:
    power = busy(seed)
    reported_w = sampled_every_100_ms(power, 0.01 * seed)
    honest = evaluate_readings(record_readings(power, seconds=2.4, reported_w=reported_w))
    assert honest.reason is None, honest
    assert honest.ratio_margin is not None
    assert honest.ratio_margin > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_a_counter_that_counts_triple_is_rejected_on_a_busy_board(seed: int) -> None:
    power = busy(seed)
    assert "counter reads" in (evaluate_readings(record_readings(power, seconds=2.4, gain=3.0)).reason or "")


def test_delayed_power_readings_do_not_reject_the_counter() -> None:
    """Power was 500 W until just before the check, and readings are means over the last second."""
    ramp = lambda at_s: 60.0 + 440.0 * max(0.0, 1.0 - at_s)  # noqa: E731
    readings = record_readings(steady(60.0), reported_w=ramp, seconds=1.1)
    assert "counter reads" in (evaluate_readings(readings, power_age_s=0.0).reason or "")
    assert evaluate_readings(readings, power_age_s=1.0).reason is None


def test_the_refresh_period_of_power_is_found_without_a_counter() -> None:
    reported_w = lambda at_s: 60.0 + int(at_s * 10 + 0.001) % 3  # noqa: E731
    readings = [reading._replace(energy_j=None) for reading in record_readings(reported_w)]
    result = evaluate_readings(readings)
    assert result.power_period_s == pytest.approx(0.1, rel=0.02)
    assert (result.ticks, result.period_s, result.reason) == (0, None, None)
    assert evaluate_readings([reading._replace(watts=60.0) for reading in readings]).power_period_s is None


def test_boards_are_checked_concurrently_without_mixing_results() -> None:
    def board(period_s: float, watts: float) -> Callable[[], tuple[float, float]]:
        return lambda: (time.monotonic() // period_s * period_s * watts, watts)

    polls = {"fast": board(0.05, 300.0), "slow": board(0.1, 60.0)}
    results = check_counters(polls, dict.fromkeys(polls, 0.1))
    assert results["fast"].period_s == pytest.approx(0.05, rel=0.2)
    assert results["slow"].period_s == pytest.approx(0.1, rel=0.2)
    assert [round(results[name].mean_w or 0) for name in polls] == [300, 60]
    assert {result.reason for result in results.values()} == {None}


def test_a_board_that_fails_during_the_check_ends_it() -> None:
    def poll() -> tuple[float, float]:
        raise MeterError("nvml: GPU is lost (GPU-a)")

    with pytest.raises(MeterError, match=r"^nvml: GPU is lost \(GPU-a\)$"):
        check_counters({"a": poll}, {"a": 0.1})


BOARD = CheckedBoard(uuid="GPU-a", driver="580.1", boot="b", sources=["NVML_FI_DEV_ENERGY"])
FIT = CheckResult(duration_s=1.0, ticks=10, period_s=0.1)
UNFIT = CheckResult(duration_s=1.0, reason="stood still for 1.0 s")
BUSY = CheckResult(duration_s=2.5, ticks=25, period_s=0.1, ratio=1.2, ratio_margin=0.4)


def the_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_stored_result_is_loaded_by_another_process(tmp_path: Path) -> None:
    CheckCache(tmp_path / "new" / "meters").store(BOARD, FIT)
    assert CheckCache(tmp_path / "new" / "meters").load(BOARD) == FIT


@pytest.mark.parametrize(
    "changed", [{"uuid": "GPU-b"}, {"driver": "581"}, {"boot": "c"}, {"tool": "0"}, {"sources": ["other"]}]
)
def test_a_result_applies_only_to_the_same_board_driver_boot_and_sources(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    assert cache.load(msgspec.structs.replace(BOARD, **changed)) is None
    assert cache.load(BOARD) == FIT


@pytest.mark.parametrize("damage", [b"", b'{"board": 3}'])
def test_a_damaged_cache_file_is_ignored_and_replaced(tmp_path: Path, damage: bytes) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    the_file(tmp_path).write_bytes(damage)
    CheckCache._kept.clear()
    assert cache.load(BOARD) is None
    cache.store(BOARD, FIT)
    assert cache.load(BOARD) == FIT


def test_an_unwritable_cache_still_serves_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has the result of an earlier driver."""
    CheckCache(tmp_path).store(msgspec.structs.replace(BOARD, driver="579"), FIT)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(selfcheck, "replace_file", refuse)
    CheckCache(tmp_path).store(BOARD, FIT)
    assert CheckCache(tmp_path).load(BOARD) == FIT
    assert CheckCache(tmp_path / "elsewhere").load(BOARD) is None


def test_rejections_and_uncertain_results_expire(tmp_path: Path) -> None:
    cache = CheckCache(tmp_path)
    for result, later in ((UNFIT, None), (BUSY, None), (FIT, FIT)):
        cache.store(BOARD, result)
        assert cache.load(BOARD) == result
        entry = json.loads(the_file(tmp_path).read_text())
        entry["checked_s"] = time.time() - PROVISIONAL_S - 1
        the_file(tmp_path).write_text(json.dumps(entry))
        CheckCache._kept.clear()
        assert cache.load(BOARD) == later
