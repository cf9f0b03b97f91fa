# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a lease without competition. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import filelock

from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire

NUMBERS = (1, 8)

#: Highest acceptable median (milliseconds).
MAX_MS = 1.0

OURS, PEER = "lease", "filelock"


def make_lease_call(number: int) -> Callable[[], None]:
    """Return a function that leases and releases boards: two locks per board, and a line about the holder."""
    request = LockRequest((), number, tuple((DeviceLock(f"GPU-{board}"),) for board in range(8)))
    return lambda: acquire(request, 0.0, "benchmarks/test_x.py::test_y").release()


def make_filelock_call(number: int, directory: Path) -> Callable[[], None]:
    """Return a function that takes as many locks of ``filelock``, without a queue or a record of holders."""
    locks = [filelock.FileLock(directory / f"{board}.lock") for board in range(number)]

    def take() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)

    return take


def main(argv: Sequence[str]) -> int:
    """Measure both alternately and print the table. Returns 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1000, metavar="N", help="repeats per kind (1000)")
    parser.add_argument("--json", type=Path, default=Path("lease_cost.json"), metavar="FILE")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lease-cost-") as scratch:
        os.environ["LLENERGY_LOCK_DIR"] = scratch
        for number in NUMBERS:
            tools = {OURS: make_lease_call(number), PEER: make_filelock_call(number, Path(scratch))}
            times: dict[str, list[float]] = {name: [] for name in tools}
            for turn in range(args.turns + 1):
                for name, take in tools.items():
                    start_s = time.perf_counter()
                    take()
                    # The first one creates the files.
                    times[name] += [(time.perf_counter() - start_s) * 1e3] if turn else []
            for name in tools:
                p99 = quantiles(times[name], n=100)[98]
                rows.append({"what": name, "boards": number, "median_ms": median(times[name]), "p99_ms": p99})
    print("| | boards | median (ms) | 99th percentile (ms) |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['what']} | {row['boards']} | {row['median_ms']:.3f} | {row['p99_ms']:.3f} |")
    host = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    args.json.write_text(json.dumps({"host": host, "turns": args.turns, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["median_ms"] < MAX_MS for row in rows if row["what"] == OURS) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
