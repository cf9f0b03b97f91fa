# SPDX-License-Identifier: Apache-2.0
"""What the background reader may take, on a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pytest_llenergy.meters.schedule import CREDIT_NS, SHARE, SHARE_AT_WORK, Thrift

from .waves import MS, S


@contextmanager
def at_work(thrift: Thrift) -> Iterator[None]:
    thrift.work_begins()
    yield
    thrift.work_ends()


def share(thrift: Thrift, cost_ns: int, wanted_ns: int, seconds: float, longest_ns: float = S) -> float:
    """Share of a core that wake-ups of one cost take, when they are wanted so often, over some time."""
    now_ns, woken_ns, spent_ns = 0, 0, 0
    while now_ns < seconds * S:
        spent_ns += cost_ns
        thrift.pay(cost_ns, now_ns - woken_ns)
        woken_ns = now_ns
        now_ns += max(wanted_ns, thrift.wait_ns(longest_ns))
    return spent_ns / now_ns


def test_a_reader_that_wants_less_than_its_share_is_never_put_off() -> None:
    assert share(Thrift(), 50_000, 10 * MS, 20) == pytest.approx(0.005, rel=0.01)


@pytest.mark.parametrize("cost_ns", [50_000, 200_000, 800_000])
def test_a_reader_that_wants_more_gets_its_share(cost_ns: int) -> None:
    assert share(Thrift(), cost_ns, MS, 60) == pytest.approx(SHARE, rel=0.02)


@pytest.mark.parametrize("cost_ns", [50_000, 200_000])
def test_it_gets_less_while_something_is_at_work(cost_ns: int) -> None:
    thrift = Thrift()
    with at_work(thrift):
        assert share(thrift, cost_ns, MS, 60) == pytest.approx(SHARE_AT_WORK, rel=0.02)
    assert share(thrift, cost_ns, MS, 60) == pytest.approx(SHARE, rel=0.02)


def test_what_the_work_loses_by_handing_over_the_interpreter_counts_too() -> None:
    def wake_ups(handovers: int) -> int:
        thrift, now_ns, count = Thrift(), 0, 0
        with at_work(thrift):
            while now_ns < 20 * S:
                elapsed_ns = max(MS, thrift.wait_ns(S))
                now_ns += elapsed_ns
                thrift.pay(50_000, elapsed_ns, handovers)
                count += 1
        return count

    # Of a quarter of a percent of 20 s.
    assert wake_ups(0) == pytest.approx(1000, rel=0.02)
    assert wake_ups(2) == pytest.approx(250, rel=0.02)


def test_work_that_overlaps_ends_with_the_last_of_it() -> None:
    thrift = Thrift()
    thrift.work_begins()
    thrift.work_begins()
    thrift.work_ends()
    assert thrift.sparing
    thrift.work_ends()
    assert not thrift.sparing


def test_nobody_is_put_off_where_close_readings_matter() -> None:
    thrift = Thrift()
    with thrift.closely():
        assert share(thrift, 200_000, MS, 5) == pytest.approx(0.2)
    assert thrift.wait_ns(S) == 0  # What was taken there is not to be paid back.


def test_who_asks_beside_work_gets_the_usual_share() -> None:
    thrift = Thrift()
    with at_work(thrift), thrift.closely():
        assert not thrift.sparing
        assert share(thrift, 200_000, MS, 60) == pytest.approx(SHARE, rel=0.02)


def test_readings_that_must_not_come_late_are_always_made() -> None:
    thrift = Thrift(always_closely=True)
    with at_work(thrift):
        assert not thrift.sparing
        assert share(thrift, 200_000, MS, 5) == pytest.approx(0.2)


def test_a_debt_is_forgotten_but_for_a_moment() -> None:
    thrift = Thrift()
    thrift.pay(S, 0)
    assert thrift.wait_ns(10 * S) == pytest.approx(CREDIT_NS / SHARE)


def test_what_was_saved_is_spent_after_the_work_and_no_more_than_the_credit() -> None:
    thrift = Thrift()
    with at_work(thrift):
        share(thrift, 50_000, 100 * MS, 100)
    spent_ns = 0
    while not thrift.wait_ns(S):
        thrift.pay(100_000, MS)
        spent_ns += 100_000 - round(SHARE * MS)
    assert spent_ns == pytest.approx(CREDIT_NS, abs=200_000)


@pytest.mark.parametrize("working", [False, True])
def test_no_reading_is_put_off_for_so_long_that_a_tick_is_missed(working: bool) -> None:
    thrift = Thrift()
    with ExitStack() as stack:
        if working:
            stack.enter_context(at_work(thrift))
        thrift.pay(50 * MS, 0)
        assert thrift.wait_ns(90 * MS) == 90 * MS


def test_one_slow_reading_does_not_put_off_the_rest_of_the_work() -> None:
    thrift = Thrift()
    with at_work(thrift):
        thrift.pay(20 * MS, 2 * S)
        thrift.pay(0, S)
        assert thrift.wait_ns(S) == 0


def beside(thrift: Thrift, wakes: int = 1) -> None:
    """Wake-ups that handed over the lock to a loop in this process, and took a millisecond of it each."""
    for _ in range(wakes):
        thrift.pay(325_000, 90 * MS, handovers=9, busy=True)


def test_only_handovers_of_a_busy_process_one_wake_up_after_the_other_are_work_beside() -> None:
    thrift = Thrift()
    beside(thrift, 5)
    found = [thrift.beside]  # Nothing is measured.
    with at_work(thrift):
        thrift.pay(325_000, 90 * MS, handovers=9)
        found.append(thrift.beside)  # It was late, as one is beside other processes.
        for _ in range(2):
            beside(thrift)
            found.append(thrift.beside)
        thrift.pay(325_000, 90 * MS, busy=True)
        found.append(thrift.beside)
    assert found == [False, False, False, True, False]


def test_what_the_ticks_after_an_edge_took_of_the_lock_is_paid_back() -> None:
    thrift = Thrift()
    with at_work(thrift):
        beside(thrift, 5)
        took_ns = 4 * (1_000_000 - SHARE_AT_WORK * 90 * MS)
        # One more was not paid for by anybody: it came before it was known what is beside.
        assert took_ns <= thrift.wait_ns(100 * S) * SHARE_AT_WORK <= took_ns + 1_000_000
        thrift.pay(0, 100 * S)
        assert thrift.wait_ns(100 * S) == 0


def test_work_that_begins_or_ends_is_an_edge() -> None:
    thrift = Thrift()
    with at_work(thrift):
        assert thrift.edges == 1
    assert thrift.edges == 2
