# SPDX-License-Identifier: Apache-2.0
"""Random suites, written as test files that log when each test held its boards."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random

WIDTHS = (1, 2, 4, 8)
BOARDS = 8

#: How many later tests may overtake one in the ideal queue.
MAX_PASSES = 8


@dataclass(frozen=True)
class Job:
    """A test that keeps ``n`` boards busy for ``seconds``."""

    n: int
    seconds: float


@dataclass(frozen=True)
class Span:
    """When a test held which boards, on the monotonic clock (seconds)."""

    start_s: float
    end_s: float
    boards: tuple[str, ...]


def draw_suite(rng: Random, tests: int, widest: int, least_s: float, most_s: float) -> list[Job]:
    """Draw a suite. Wide tests are as frequent as narrow ones, which is the hardest case to pack."""
    widths = [width for width in WIDTHS if width <= widest]
    return [Job(rng.choice(widths), rng.uniform(least_s, most_s)) for _ in range(tests)]


def lower_bound_s(jobs: list[Job], workers: int) -> float:
    """Return a lower bound of the makespan: work over boards, tests over workers, and the longest test."""
    return max(
        sum(job.n * job.seconds for job in jobs) / BOARDS,
        sum(job.seconds for job in jobs) / workers,
        max(job.seconds for job in jobs),
    )


def ideal_queue_s(jobs: list[Job], workers: int, models: int) -> float:
    """Return the makespan of an ideal queue in which nothing but the tests takes time.

    Each worker runs one test after the other in their order and waits for its boards.
    """
    free = {board: board * models // BOARDS for board in range(BOARDS)}
    ahead, waiting, passed = deque(range(len(jobs))), list[int](), Counter[int]()
    running: list[tuple[float, int, dict[int, int]]] = []
    now_s, idle = 0.0, workers

    def take(n: int) -> dict[int, int]:
        """The boards of a test: of one model, if a model has so many."""
        groups = [{board: own for board, own in free.items() if own == model} for model in range(models)]
        groups = groups if n <= BOARDS // models else [free]
        return next((dict([*group.items()][:n]) for group in groups if len(group) >= n), {})

    while ahead or waiting or running:
        while idle and ahead:
            waiting.append(ahead.popleft())
            idle -= 1
        for place, job in enumerate(waiting):
            if any(passed[other] >= MAX_PASSES for other in waiting[:place]):
                continue
            boards = take(jobs[job].n)
            if boards:
                passed.update(waiting[:place])
                waiting.remove(job)
                for board in boards:
                    del free[board]
                heappush(running, (now_s + jobs[job].seconds, job, boards))
                break
        else:
            now_s, _, boards = heappop(running)
            free.update(boards)
            idle += 1
    return now_s


TEST_FILE = """
import json, os, time
import pytest
JOBS = {jobs}

@pytest.mark.parametrize(
    "seconds",
    # In the worker: a process for each test costs more than leases do.
    [pytest.param(seconds, marks=pytest.mark.gpus(n, isolate=False)) for n, seconds in JOBS],
    ids=str,
)
def test_it({fixture}, seconds):
    start = time.monotonic()
    # The work: it needs boards and no core.
    time.sleep(seconds)
    line = [start, time.monotonic(), list({boards})]
    with open({log!r}, "a") as file:
        file.write(json.dumps(line) + "\\n")
"""

#: Plain pytest-xdist with one lock for all tests: what users write who know that tests must not share a
#: board.
ONE_LOCK = """
import filelock, pytest
@pytest.fixture
def one_lock():
    with filelock.FileLock({lock!r}):
        yield
"""


def write_suite(jobs: list[Job], directory: Path, *, leases: bool) -> Path:
    """Write the suite into a directory. Returns the file in which its tests log their spans."""
    log = directory / "spans.jsonl"
    fixture, boards = ("gpus", "gpus.uuids") if leases else ("one_lock", "['all']")
    pairs = [(job.n, round(job.seconds, 4)) for job in jobs]
    text = TEST_FILE.format(jobs=pairs, fixture=fixture, boards=boards, log=str(log))
    (directory / "test_suite.py").write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    if not leases:
        (directory / "conftest.py").write_text(ONE_LOCK.format(lock=str(directory / "one.lock")))
    return log


def read_spans(log: Path) -> list[Span]:
    """Read the logged spans. Raises ``SystemExit`` if two tests held a board at the same time."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    spans = sorted((Span(start, end, tuple(boards)) for start, end, boards in lines), key=lambda s: s.start_s)
    last: dict[str, float] = {}
    for span in spans:
        if any(last.get(board, 0.0) > span.start_s for board in span.boards):
            raise SystemExit(f"two tests held a board at the same time: {span}{os.linesep}{log.read_text()}")
        last.update(dict.fromkeys(span.boards, span.end_s))
    return spans


def makespan_s(spans: list[Span]) -> float:
    """Return the time from the start of the first test to the end of the last."""
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)
