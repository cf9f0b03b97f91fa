# SPDX-License-Identifier: Apache-2.0
"""Failures in ranks: report the first cause, with output and stacks."""

from __future__ import annotations

import re
import signal
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.workers.host import Host
from pytest_llenergy.workers.plan import RankPlan
from pytest_llenergy.workers.proctree import PROC

# What went wrong in a rank, told so that the first cause is the one that a user reads.

#: Enough for the stacks of a rank's threads.
TAIL_LINES = 120
TAIL_BYTES = 16384
#: A dead rank's socket closes before the process is reaped.
REAP_TIMEOUT_S = 2.0


#: How gloo (transport/tcp/pair.cc) and NCCL (ncclRemoteError, ncclResult_t) tell that a peer is gone.
PEER_LOST = re.compile(
    r"connection (was )?(reset|closed|refused) by (remote )?peer|connection reset|broken pipe|ncclRemoteError"
    r"|remote process exited",
    re.IGNORECASE,
)

#: How much of what another rank has said is shown in the line about it.
OTHERS_CHARACTERS = 200

Outputs = Sequence[tuple[RankPlan, list[str]]]
"""What each rank has printed lately."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure: its plan, its process and what it (or its death) said."""

    plan: RankPlan
    pid: int
    said: dict[str, Any]
    output: list[str]

    @property
    def is_outcome(self) -> bool:
        """Whether it skips, or ends the run, rather than fails."""
        return self.said.get("outcome") not in (None, "Failed")

    @property
    def is_echo(self) -> bool:
        """Whether all it says is that another rank is gone: torch does, not the test in words like these.

        Ranks that are not ready yet do not say who raised it. It can only be torch.
        """
        return bool(self.said.get("collective", True) and PEER_LOST.search(str(self.said["message"])))

    @property
    def line(self) -> str:
        """What it said, on one line."""
        return (str(self.said["message"]).splitlines() or [""])[0]

    @property
    def time_ns(self) -> int:
        return int(self.said.get("time_ns", 0))


class OutcomeInRank(Exception):  # noqa: N818 - it carries an outcome, which need not be an error
    """pytest's skip, xfail or fail was raised inside the ranks. Handed on by the fixtures."""

    def __init__(self, outcome: str, reason: str, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        #: Of ``pytest.exit``, where it gave one.
        self.exit_code = exit_code


def describe_death(host: Host, group: str, pid: int) -> dict[str, Any]:
    """Describe a rank that ended without an answer."""
    now_ns = time.monotonic_ns()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    try:
        while (code := host.code(group, pid)) is None and time.monotonic() < deadline:
            # Only after a death: the supervisor answers requests, and sends nothing of itself.
            time.sleep(0.01)
    except WorkerError as error:
        return {"time_ns": now_ns, "message": str(error)}
    if code is None:
        return {"time_ns": now_ns, "message": "closed its connection"}
    if code < 0:
        name = signal_name(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return {"time_ns": now_ns, "message": f"was killed by {name}{hint}"}
    return {"time_ns": now_ns, "message": f"ended with exit code {code} and no result"}


def signal_name(number: int) -> str:
    """``SIGSEGV``, or ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_tail(log: Path, start: int) -> list[str]:
    """The last lines of a log after ``start`` bytes, kept to what a person reads."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


def raise_hang(silent: Sequence[RankPlan], world_size: int, timeout_s: float, outputs: Outputs) -> NoReturn:
    """Describe ranks that did not answer in time; every rank has written down where its threads are."""
    names = ", ".join(f"rank {plan.rank} of {world_size} ({plan.device})" for plan in silent)
    raise WorkerError(
        f"{names} did not answer within {timeout_s:g} s; the ranks were ended", sections=_sections(outputs)
    )


def raise_first_cause(
    failures: Sequence[Failure], world_size: int, outputs: Outputs, silent: Sequence[RankPlan] = ()
) -> NoReturn:
    """Raise the first cause; what the others said is usually its echo.

    A collective that lost a peer often says so before the peer's own end is seen. An error comes before an
    outcome of pytest: where one rank skips and another fails, the test has failed. What the others said is
    in a line of its own, last. Those that are ``silent`` have not answered when the group is ended.
    """
    first = min(failures, key=lambda each: (each.is_outcome, each.is_echo, each.time_ns))
    said = first.said
    if said.get("outcome") and said["outcome"] != "Failed":
        raise OutcomeInRank(said["outcome"], f"{said['reason']}{_unheard(silent)}", said.get("exit_code"))
    where = f"rank {first.plan.rank} of {world_size} ({first.plan.device}, pid {first.pid})"
    ours = getattr(errors, said["ours"], None) if said.get("ours") else None
    if ours is not None and not issubclass(ours, WorkerError):
        # What a user can mend by its own words; which rank says so matters where there are several.
        error = ours(said["reason"] if world_size == 1 else f"{where}: {said['reason']}")
        if isinstance(error, errors.ServerError):
            error.sections = _sections(outputs)
        raise error
    # That of the rank itself first.
    told = sorted(outputs, key=lambda output: output[0].rank != first.plan.rank)
    traceback = str(said.get("traceback", "")).rstrip()
    details = "\n\n".join(filter(None, (traceback, _others(failures, first))))
    raise WorkerError(f"{where}: {said['message']}", details, sections=_sections(told))


def _unheard(silent: Sequence[RankPlan]) -> str:
    """What nobody knows of, behind the reason of a skip: those ranks might have failed."""
    if not silent:
        return ""
    ranks = ", ".join(str(plan.rank) for plan in silent)
    return f" ({'rank' if len(silent) == 1 else 'ranks'} {ranks} still at work, and ended)"


def _others(failures: Sequence[Failure], first: Failure) -> str:
    """One line of what they said, and when; of those that have only lost a peer the first stands for all."""
    said: dict[tuple[str, str], list[Failure]] = {}
    for each in sorted(failures, key=lambda failure: failure.time_ns):
        if each is not first:
            when = "later" if each.time_ns >= first.time_ns else "earlier"
            said.setdefault((when, "a lost peer" if each.is_echo else each.line), []).append(each)
    return "; ".join(_told(when, alike) for (when, _), alike in said.items())


def _told(when: str, alike: Sequence[Failure]) -> str:
    ranks = ", ".join(str(each.plan.rank) for each in alike)
    shown = textwrap.shorten(alike[0].line, OTHERS_CHARACTERS, placeholder=" …")
    return f"{'rank' if len(alike) == 1 else 'ranks'} {ranks} {when}: {shown}"


def _sections(outputs: Outputs) -> tuple[tuple[str, str], ...]:
    return tuple((f"output of rank {plan.rank}", "\n".join(lines)) for plan, lines in outputs if lines)


# Whether a rank that hangs has written down where its threads are, and if not, why.

#: What a rank writes its stacks on, by faulthandler, also while one thread holds the interpreter's lock.
STACKS_SIGNAL = signal.SIGUSR2

#: What faulthandler writes above the frames of each thread, and how far it is looked for: a rank may be busy
#: printing.
STACKS_TITLE, STACKS_SEARCH_BYTES = b"(most recent call first):", 1 << 20

#: Fields of a process's status with a mask of signals that it does not answer (proc_pid_status(5)).
SIGNAL_MASKS = (("SigIgn", "ignores"), ("SigBlk", "blocks"))

#: States in which a process does not answer signals (proc_pid_stat(5)).
PROCESS_STATES = {
    "T": "is stopped, by SIGSTOP or the like",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel",
    "Z": "has ended",
}


def has_stacks(log: Path, start: int) -> bool:
    """Whether they are in a rank's log from ``start`` bytes on."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            return STACKS_TITLE in file.read(STACKS_SEARCH_BYTES)
    except OSError:
        return False


def may_write_stacks(pid: int | None) -> bool:
    """Whether a process that was asked for its stacks may yet write them, for all that its host tells."""
    status = _status(pid)
    if not status:
        return pid is None or not PROC.is_dir()
    # What waits in the kernel mostly does so for a moment.
    return status["State"][0] not in "TtZ" and not any(_has(status, field) for field, _ in SIGNAL_MASKS)


def explain_missing_stacks(pid: int | None) -> str:
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
    if state[0] in PROCESS_STATES:
        return f"no stacks: the process {PROCESS_STATES[state[0]]}; state {state[0]}"
    for field, what in SIGNAL_MASKS:
        if _has(status, field):
            return f"no stacks: the process {what} {STACKS_SIGNAL.name}, on which it would write them"
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
    return bool(int(status[field], 16) >> (STACKS_SIGNAL - 1) & 1)
