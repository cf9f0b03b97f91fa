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


def why_none(pid: int | None) -> str:
    """Why a rank that was asked for its stacks has written none, as far as its host tells of that process.

    ``None`` stands for a process of another host.
    """
    asked = "it was asked for its stacks and wrote none"
    if pid is None or not PROC.is_dir():
        return asked
    try:
        # Name and value, one a line (proc_pid_status(5)).
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        return "no stacks: the process is gone"
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = told["State"]
    if state[0] in STATES:
        return f"no stacks: the process {STATES[state[0]]}; state {state[0]}"
    for field, what in (("SigIgn", "ignores"), ("SigBlk", "blocks")):
        if int(told[field], 16) >> (SIGNAL - 1) & 1:
            return f"no stacks: the process {what} {SIGNAL.name}, on which it would write them"
    return f"{asked}; state {state[0]}"
