# SPDX-License-Identifier: Apache-2.0
"""Measure how long a test that needs four boards waits among six processes that keep taking one."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire, lock_name

BOARDS = tuple(DeviceLock(f"GPU-{board}") for board in range(4))

#: Highest acceptable wait for a lease, and how long polling is tried (seconds).
MAX_S, POLLING_S = 1.0, 10.0

REST_S = 0.5

#: Takes one board for the given seconds, again and again, until killed.
LOOP = """
import sys, time
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
request = LockRequest((), 1, tuple((DeviceLock(f"GPU-{board}"),) for board in range(4)))
print(flush=True)
while True:
    held = acquire(request, 60)
    # The work that needs the board.
    time.sleep(float(sys.argv[1]))
    held.release()
"""


@contextmanager
def run_loops(number: int, seconds: float) -> Iterator[None]:
    """Run ``number`` processes that keep taking one board for ``seconds`` each."""
    with ExitStack() as stack:
        for _ in range(number):
            command = [sys.executable, "-c", LOOP, str(seconds)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def measure_lease_s() -> float:
    """Return the seconds until all four boards are leased through the queue."""
    start_s = time.monotonic()
    acquire(LockRequest(BOARDS), 60.0).release()
    return time.monotonic() - start_s


def measure_polling_s() -> float | None:
    """Return the seconds until all four boards are locked by polling every 50 ms; None if never."""
    paths = [Path(os.environ["LLENERGY_LOCK_DIR"], lock_name(board.device)) for board in BOARDS]
    start_s = time.monotonic()
    while (spent_s := time.monotonic() - start_s) < POLLING_S:
        with ExitStack() as files, suppress(BlockingIOError):
            for path in paths:
                fcntl.flock(files.enter_context(path.open()), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return spent_s
        # Polling is the alternative without a queue.
        time.sleep(0.05)
    return None


def main(argv: Sequence[str]) -> int:
    """Measure both ways alternately. Returns 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds per method (5)")
    parser.add_argument(
        "--seconds", type=float, default=0.03, metavar="S", help="time for which a board is held (0.03)"
    )
    parser.add_argument("--json", type=Path, default=Path("fairness.json"), metavar="FILE")
    args = parser.parse_args(argv)
    ours: list[float | None] = []
    naive: list[float | None] = []
    with tempfile.TemporaryDirectory(prefix="fairness-") as scratch:
        os.environ["LLENERGY_LOCK_DIR"] = scratch
        with run_loops(6, args.seconds):
            for _ in range(args.rounds):
                for take, times in ((measure_lease_s, ours), (measure_polling_s, naive)):
                    # Right after all four are released, they are briefly free.
                    time.sleep(REST_S)
                    times.append(take())
    never = sum(spent_s is None for spent_s in naive)
    leased = [spent_s for spent_s in ours if spent_s is not None]
    print(f"lease: median {median(leased):.3f} s, at most {max(leased):.3f} s (limit: {MAX_S:g} s)")
    print(f"polling: not within {POLLING_S:g} s in {never} of {args.rounds}")
    args.json.write_text(json.dumps({"lease_s": ours, "polled_s": naive}, indent=1) + "\n")
    return 0 if max(leased) < MAX_S else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
