# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a rank, told so that the first cause is the one that a user reads."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.workers.plan import RankPlan

TAIL_LINES = 30
TAIL_BYTES = 8192
#: A dead rank's socket closes before the process can be reaped.
REAP_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Failure:
    """One rank's failure: its plan, its process and what it (or its death) said."""

    plan: RankPlan
    pid: int
    said: dict[str, Any]
    output: list[str]

    @property
    def time_ns(self) -> int:
        return int(self.said.get("time_ns", 0))


class OutcomeInRank(Exception):  # noqa: N818 - it carries an outcome, which need not be an error
    """pytest's skip, xfail or fail was raised inside the ranks. Handed on by the fixtures."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


def death(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Describe a rank that ended without an answer."""
    try:
        code = process.wait(REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"time_ns": time.monotonic_ns(), "message": "closed its connection"}
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return {"time_ns": time.monotonic_ns(), "message": f"was killed by {name}{hint}"}
    return {"time_ns": time.monotonic_ns(), "message": f"ended with exit code {code} and no result"}


def tail(log: Path, start: int) -> list[str]:
    """The last lines of a log after ``start`` bytes, kept to what a person reads."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


def hang(silent: Sequence[RankPlan], world_size: int, timeout_s: float) -> str:
    """Describe ranks that did not answer in time."""
    names = ", ".join(f"rank {plan.rank} of {world_size} ({plan.device})" for plan in silent)
    return f"{names} did not answer within {timeout_s:g} s; the ranks were ended"


def raise_first(failures: Sequence[Failure], world_size: int) -> NoReturn:
    """Raise the earliest failure; the others are usually its echo."""
    first = min(failures, key=lambda failure: failure.time_ns)
    said = first.said
    if said.get("outcome"):
        raise OutcomeInRank(said["outcome"], said["reason"])
    ours = getattr(errors, said["ours"], None) if said.get("ours") else None
    if ours is not None and not issubclass(ours, WorkerError):
        raise ours(said["reason"])
    where = f"rank {first.plan.rank} of {world_size} ({first.plan.device}, pid {first.pid})"
    raise WorkerError(f"{where}: {said['message']}", _details(first))


def _details(failure: Failure) -> str:
    parts = [str(failure.said.get("traceback", "")).rstrip()]
    if failure.output:
        parts.append(f"last output of rank {failure.plan.rank}:")
        parts.extend(f"  {line}" for line in failure.output)
    return "\n".join(part for part in parts if part)
