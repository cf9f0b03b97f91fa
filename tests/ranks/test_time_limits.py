# SPDX-License-Identifier: Apache-2.0
"""A call has one time limit for all its requests. The transfer of large data does not count."""

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
    workload = call_workload(pair, time.sleep, (2.0,), {}, 7.0)
    for _ in range(4):
        workload.run_round()
        # Such as the meters' waits between rounds.
        time.sleep(0.1)


def slow_down_files(part_s: float) -> None:
    """Let files of messages move in parts of 32 KiB, each in ``part_s`` seconds."""
    import io
    import time

    from pytest_llenergy.ranks import timeouts, transport

    class SlowFile(io.FileIO):
        def write(self, data: Any) -> int:
            time.sleep(part_s)
            return super().write(data)

        def readinto(self, data: Any) -> int:
            time.sleep(part_s)
            return super().readinto(data)

    class SlowParts(transport._Parts):
        def __init__(self, file: Any, progress: Any) -> None:
            super().__init__(SlowFile(file.fileno(), closefd=False), progress)

    timeouts.TRANSFER_PART_BYTES = 1 << 15
    vars(transport).update(FileIO=SlowFile, _Parts=SlowParts)


#: 32 parts.
LARGE = 1 << 20


def test_large_results_move_longer_than_the_limit(pair: RankGroup) -> None:
    run(pair, slow_down_files, 0.2)
    assert run(pair, bytes, LARGE, timeout_s=6) == [bytes(LARGE)] * 2


def test_large_arguments_move_longer_than_the_limit(pair: RankGroup) -> None:
    run(pair, slow_down_files, 0.2)
    assert run(pair, len, bytes(LARGE), timeout_s=6) == [LARGE] * 2


def test_a_transfer_that_is_stuck_ends_at_the_limit(pair: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "TRANSFER_STUCK_S", 0.5)
    run(pair, slow_down_files, 60)
    with pytest.raises(WorkerError, match="did not answer within 1 s"):
        run(pair, bytes, LARGE, timeout_s=1)


def test_no_file_of_a_large_argument_stays(pair: RankGroup) -> None:
    directory = pair._ranks[0].channel.directory

    def files(_argument: bytes) -> list[str]:
        return sorted(each.name for each in directory.iterdir() if each.name.startswith("message-"))

    before = set(directory.iterdir())
    assert run(pair, files, bytes(LARGE)) == [[], []]
    assert set(directory.iterdir()) == before
