# SPDX-License-Identifier: Apache-2.0
"""How long does a loop of Python wait for the interpreter's lock while it is metered in the same process?

``PYTHONPATH=. python benchmarks/plugin/cost/cost_waits.py [--spans N] [--json FILE]``. Linux only. The kernel
tells of a thread how long it ran and how long it waited for a core (``/proc/PID/task/TID/schedstat``); the
rest of the time a loop that never sleeps has waited for the lock. Unlike its speed, that hardly depends on
who else uses the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev

from cost_world import boards

from pytest_llenergy.meters import measure
from tests.nvml_sim import build_library

SPAN_S = 2.0
NUMBERS_OF_BOARDS = (1, 8)


def ran_or_queued_ns() -> int:
    """How long this thread ran or waited for a core so far."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    ran_ns, queued_ns, _ = map(int, path.read_text().split())
    return ran_ns + queued_ns


def waited() -> float:
    """The share of the time that a loop of two seconds was kept from running by the lock."""
    before_ns, start_ns, total = ran_or_queued_ns(), time.monotonic_ns(), 0
    while time.monotonic_ns() - start_ns < SPAN_S * 1e9:
        for turn in range(10_000):
            total += turn * turn % 7
    elapsed_ns = time.monotonic_ns() - start_ns
    return 1 - (ran_or_queued_ns() - before_ns) / elapsed_ns


def compared(number: int, spans: int, directory: Path) -> dict[str, object]:
    """Shares with and without metering, in turn."""
    shares: dict[str, list[float]] = {"metered": [], "not metered": []}
    with boards(number, directory) as uuids:
        for _ in range(spans):
            shares["not metered"].append(waited())
            with ExitStack() as stack:
                measuring = stack.enter_context(measure(uuids, ("nvml",)))
                stack.enter_context(measuring.window("span"))
                shares["metered"].append(waited())
    told = [
        f"{fmean(each):.3%} ± {stdev(each) / len(each) ** 0.5:.3%} {name}" for name, each in shares.items()
    ]
    print(f"{number} board(s): the loop has waited for the lock {', '.join(told)}", flush=True)
    return {"boards": number, "shares": shares}


def main() -> None:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=12, metavar="N", help="metered spans of two seconds")
    parser.add_argument("--json", type=Path, default=Path("cost_waits.json"), metavar="FILE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cost-waits-") as directory:
        os.environ["LLENERGY_CACHE_DIR"] = directory
        # One with this name that is loaded is what the real pynvml finds.
        ctypes.CDLL(str(build_library(Path(directory) / "library")))
        rows = [compared(number, given.spans, Path(directory)) for number in NUMBERS_OF_BOARDS]
    given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
