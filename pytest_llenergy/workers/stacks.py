# SPDX-License-Identifier: Apache-2.0
"""Whether a rank that hangs has written down where its threads are, and if not, why."""

from __future__ import annotations

import signal
from pathlib import Path

from pytest_llenergy.workers.family import PROC

#: What a rank writes its stacks on, by faulthandler, also while one thread holds the interpreter's lock.
SIGNAL = signal.SIGUSR2

#: What faulthandler writes above the frames of each thread, and how far it is looked for: a rank may be busy
#: printing.
TITLE, SEARCHED_BYTES = b"(most recent call first):", 1 << 20

#: Fields of a process's status with a mask of signals that it does not answer (proc_pid_status(5)).
MASKS = (("SigIgn", "ignores"), ("SigBlk", "blocks"))

#: States in which a process does not answer signals (proc_pid_stat(5)).
STATES = {
    "T": "is stopped, by SIGSTOP or the like",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel",
    "Z": "has ended",
}


def are_in(log: Path, start: int) -> bool:
    """Whether they are in a rank's log from ``start`` bytes on."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            return TITLE in file.read(SEARCHED_BYTES)
    except OSError:
        return False


def can_come(pid: int | None) -> bool:
    """Whether a process that was asked for its stacks may yet write them, for all that its host tells."""
    status = _status(pid)
    if not status:
        return pid is None or not PROC.is_dir()
    # What waits in the kernel mostly does so for a moment.
    return status["State"][0] not in "TtZ" and not any(_has(status, field) for field, _ in MASKS)


def why_none(pid: int | None) -> str:
    """Why a rank that was asked for its stacks has written none, as far as its host tells of that process.

    ``None`` stands for a process of another host.
    """
    asked = "it was asked for its stacks and wrote none"
    if pid is None or not PROC.is_dir():
        return asked
    status = _status(pid)
    if not status:
        return "no stacks: the process is gone"
    state = status["State"]
    if state[0] in STATES:
        return f"no stacks: the process {STATES[state[0]]}; state {state[0]}"
    for field, what in MASKS:
        if _has(status, field):
            return f"no stacks: the process {what} {SIGNAL.name}, on which it would write them"
    return f"{asked}; state {state[0]}"


def is_stopped(pid: int) -> bool:
    """Whether it does nothing until somebody lets it go on."""
    return _status(pid).get("State", " ")[0] == "T"


def _status(pid: int | None) -> dict[str, str]:
    """What is told of a process; nothing of one that is gone, or of another host."""
    try:
        # Name and value, one a line (proc_pid_status(5)).
        told = (PROC / str(pid) / "status").read_text()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in told.splitlines() if ":\t" in line)


def _has(status: dict[str, str], field: str) -> bool:
    return bool(int(status[field], 16) >> (SIGNAL - 1) & 1)
