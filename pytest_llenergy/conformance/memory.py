# SPDX-License-Identifier: Apache-2.0
"""Whether closing frees what loading took."""

from __future__ import annotations

from statistics import median

from pytest_llenergy.conformance.in_rank import Cycles

#: The most that may stay of each model that was loaded and closed again. What leaks keeps all of it.
MOST_SHARE = 0.5


def freed(cycles: Cycles) -> str | None:
    """What is wrong, or ``None``. The first cycle is left out: it imports the engine."""
    taken = median(
        loaded - closed for loaded, closed in zip(cycles.loaded[1:], cycles.closed[:-1], strict=True)
    )
    kept = (cycles.closed[-1] - cycles.closed[0]) / (len(cycles.closed) - 1)
    if kept <= MOST_SHARE * taken:
        return None
    told = ", ".join(_mib(each) for each in cycles.closed)
    return (
        f"loading takes {_mib(taken)} MiB and {_mib(kept)} MiB more stay after each close() (MiB after each: "
        f"{told}); let go of the model, its caches and jobs in close()"
    )


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f}"
