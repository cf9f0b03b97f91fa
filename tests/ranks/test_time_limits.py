# SPDX-License-Identifier: Apache-2.0
"""A call has one time limit for all its requests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.workload import call_workload

from .groups import run


def print_for_ever() -> None:
    while True:
        print("x" * 200)


class SlowToPickle:
    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(1.2)
        return (int, ())


class SlowToUnpickle:
    def __reduce__(self) -> tuple[Any, ...]:
        return (time.sleep, (1.2,))


def work_then_pickle_slowly() -> SlowToPickle:
    time.sleep(1.2)
    return SlowToPickle()


def sleep_after(_argument: object) -> None:
    time.sleep(1.2)


def test_ranks_are_killed_soon_after_the_limit_even_if_they_print_for_ever(pair: RankGroup) -> None:
    run(pair, max, 1, 2)
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer within 1 s"):
        run(pair, print_for_ever, timeout_s=1)
    # Without a limit for their stacks, whose logs never stop growing. The rest is for a busy machine.
    assert time.monotonic() - start_s < 1 + timeouts.STACKS_TIMEOUT_S + 30


def test_work_and_result_share_the_limit(pair: RankGroup) -> None:
    with pytest.raises(WorkerError, match="did not answer within 2 s"):
        run(pair, work_then_pickle_slowly, timeout_s=2)


def test_arguments_and_work_share_the_limit(pair: RankGroup) -> None:
    with pytest.raises(WorkerError, match="did not answer within 2 s"):
        run(pair, sleep_after, SlowToUnpickle(), timeout_s=2)


def test_each_round_has_the_whole_limit(pair: RankGroup) -> None:
    workload = call_workload(pair, time.sleep, (1.0,), {}, 3.5)
    for _ in range(4):
        workload.run_round()
        # Such as the meters' waits between rounds.
        time.sleep(0.1)
