# SPDX-License-Identifier: Apache-2.0
"""The line between two clocks: known answers, and simulated clocks whose offset is known."""

from __future__ import annotations

import random

import pytest

from pytest_llenergy.hosts.clock import DRIFT_PPM, ClockLine, Exchange

SECOND = 10**9
#: Three years of uptime: more nanoseconds than a float resolves.
AHEAD = 3 * 365 * 86400 * SECOND + 1


def exchange(at_ns: int, offset_ns: int, there_ns: int = 10_000, back_ns: int = 10_000) -> Exchange:
    """An exchange whose remote reading is ``at_ns`` on the local clock."""
    return Exchange(at_ns - there_ns, at_ns + offset_ns, at_ns + back_ns)


def line(*groups: tuple[int, int]) -> ClockLine:
    """A line of groups of one exchange each: local moment and offset."""
    clock = ClockLine()
    for at_ns, offset_ns in groups:
        clock.add([exchange(at_ns, offset_ns)])
    return clock


def test_one_exchange_bounds_the_offset_by_half_its_round_trip() -> None:
    found = ClockLine().add([exchange(SECOND, AHEAD)])
    assert found.offset_ns == AHEAD
    assert found.bound_ns == pytest.approx(10_000, abs=1)
    assert found.u_ns == pytest.approx(10_000 / 3**0.5, abs=1)


def test_a_group_is_at_least_as_good_as_its_fastest_exchange() -> None:
    slow, fast = exchange(SECOND, AHEAD, 500_000, 20_000), exchange(SECOND + 1000, AHEAD, 4000, 6000)
    found = ClockLine().add([slow, fast])
    assert found.bound_ns <= 5001
    assert abs(found.offset_ns - AHEAD) <= found.bound_ns


def test_between_two_groups_the_offset_is_on_the_line_and_beyond_them_the_bound_grows() -> None:
    clock = line((10 * SECOND, AHEAD), (20 * SECOND, AHEAD + 200_001))
    middle = clock.offset(15 * SECOND)
    assert middle.offset_ns == AHEAD + 100_000
    assert middle.bound_ns == pytest.approx(10_000, abs=1)
    for at_s, nearest in ((9, AHEAD), (21, AHEAD + 200_001)):
        beyond = clock.offset(at_s * SECOND)
        assert beyond.offset_ns == nearest
        assert beyond.bound_ns == pytest.approx(10_000 + SECOND * DRIFT_PPM / 1e6, abs=1)


def test_moments_go_there_and_back() -> None:
    clock = line((10 * SECOND, AHEAD), (20 * SECOND, AHEAD + 900_000), (30 * SECOND, AHEAD + 100_000))
    for local_ns in (5 * SECOND, 10 * SECOND, 17 * SECOND + 123, 25 * SECOND, 40 * SECOND):
        assert abs(clock.to_local(clock.to_remote(local_ns)) - local_ns) <= 1
    assert clock.to_remote(10 * SECOND) == 10 * SECOND + AHEAD


def test_clocks_of_any_rates_and_delays_are_within_the_bound() -> None:
    generator = random.Random(24)
    missed = shifted_missed = count = 0
    for _ in range(300):
        rate = generator.uniform(-80, 80) / 1e6
        clock = ClockLine()

        def offset(local_ns: int, rate: float = rate) -> int:
            return AHEAD + round(local_ns * rate)

        for start_s in (10, 20, 30):
            group, now_ns = [], start_s * SECOND
            for _ in range(8):
                there, back = (round(5000 * generator.paretovariate(1.2)) for _ in range(2))
                now_ns += there
                group.append(exchange(now_ns, offset(now_ns), there, back))
                now_ns += back
            clock.add(group)
        for _ in range(10):
            local_ns = generator.randrange(9 * SECOND, 32 * SECOND)
            found = clock.offset(local_ns)
            missed += abs(found.offset_ns - offset(local_ns)) > found.bound_ns + 2
            shifted_missed += abs(found.offset_ns - offset(local_ns) - 1_000_000) > found.bound_ns
            count += 1
        assert clock.fault(12 * SECOND, 28 * SECOND) is None
    assert missed == 0
    assert shifted_missed > 0.9 * count


@pytest.mark.parametrize("moved_ns", [-4_100_000, 4_100_000])
def test_a_clock_that_moves_faster_than_clocks_drift_is_a_fault(moved_ns: int) -> None:
    reason = line((SECOND, AHEAD), (11 * SECOND, AHEAD + moved_ns)).fault(2 * SECOND, 10 * SECOND)
    assert reason is not None
    assert f"moved by {moved_ns / 1e6:.3g} ms against pytest's within 10 s" in reason
    assert reason.endswith(f"; at most {DRIFT_PPM} parts per million are normal")


def test_a_clock_that_drifts_as_clocks_do_is_none() -> None:
    assert line((SECOND, AHEAD), (11 * SECOND, AHEAD + 900_000)).fault(2 * SECOND, 10 * SECOND) is None


def test_only_groups_around_the_moments_count() -> None:
    clock = line((SECOND, AHEAD), (11 * SECOND, AHEAD + SECOND), (21 * SECOND, AHEAD + SECOND))
    assert clock.fault(2 * SECOND, 10 * SECOND) is not None
    assert clock.fault(11 * SECOND, 20 * SECOND) is None
    assert clock.fault(10 * SECOND, 20 * SECOND) is not None
