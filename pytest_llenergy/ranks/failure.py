# SPDX-License-Identifier: Apache-2.0
"""Error reports of ranks: find the first cause, and show it with the output of all ranks."""

from __future__ import annotations

import re
import signal
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.plan import LOCALHOST, RankPlan

#: How many characters of the messages of further failed ranks an error shows.
OTHERS_CHARACTERS = 200

#: How gloo (transport/tcp/pair.cc) and NCCL (ncclRemoteError, ncclResult_t) report that a peer is gone.
PEER_LOST = re.compile(
    r"connection (was )?(reset|closed|refused) by (remote )?peer|connection reset|broken pipe|ncclRemoteError"
    r"|remote process exited",
    re.IGNORECASE,
)

Outputs = Sequence[tuple[RankPlan, list[str]]]
"""The recent output of each rank."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: its plan and pid, and its report, or how it died."""

    plan: RankPlan
    pid: int
    report: dict[str, Any]

    @property
    def is_outcome(self) -> bool:
        """Whether the rank skipped, xfailed, or ended the run, rather than failed."""
        return self.report.get("outcome") not in (None, "Failed")

    @property
    def is_echo(self) -> bool:
        """Whether it only reports that another rank is gone, with an error of torch and not of the test.

        A report from the start of a rank lacks this field; such an error can only come from torch.
        """
        return bool(self.report.get("collective", True) and PEER_LOST.search(str(self.report["message"])))

    @property
    def host_lost(self) -> str | None:
        """Why its host cannot be reached any more, if it is that which ended the rank."""
        lost: str | None = self.report.get("host_lost")
        return lost

    @property
    def first_line(self) -> str:
        """The first line of its message."""
        return (str(self.report["message"]).splitlines() or [""])[0]

    @property
    def time_ns(self) -> int:
        """When it failed, in monotonic nanoseconds."""
        return int(self.report.get("time_ns", 0))


class OutcomeInRank(Exception):  # noqa: N818 - an outcome need not be an error
    """pytest's skip, xfail or fail was raised in a rank; the fixtures raise it again in the test."""

    def __init__(self, outcome: str, reason: str, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        #: The ``returncode`` of ``pytest.exit``, if it was given one.
        self.exit_code = exit_code


def describe_death(host: Host, group: str, pid: int) -> dict[str, Any]:
    """Return the report of a rank that ended without an answer.

    Args:
        host: Host of the rank.
        group: Name of its group.
        pid: Its process id.
    """
    now_ns = time.monotonic_ns()
    deadline = time.monotonic() + timeouts.EXIT_CODE_TIMEOUT_S
    try:
        while (code := host.exit_code(group, pid)) is None and time.monotonic() < deadline:
            # Polled, since the supervisor only answers requests; nothing is measured any more.
            time.sleep(timeouts.EXIT_CODE_POLL_S)
    except WorkerError as error:
        return {"time_ns": now_ns, "message": host.lost or str(error), "host_lost": host.lost}
    if code is None:
        return {"time_ns": now_ns, "message": "closed its connection"}
    if code < 0:
        name = signal_name(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return {"time_ns": now_ns, "message": f"was killed by {name}{hint}"}
    return {"time_ns": now_ns, "message": f"ended with exit code {code} and no result"}


def signal_name(number: int) -> str:
    """Return a name such as ``SIGSEGV``, or ``signal 40`` for a signal without one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _name_rank(plan: RankPlan, world_size: int) -> str:
    """Return the number of a rank, and its host if that is not pytest's."""
    host = "" if plan.host == LOCALHOST else f" on {plan.host}"
    return f"rank {plan.rank} of {world_size}{host}"


def raise_hang(silent: Sequence[RankPlan], world_size: int, timeout_s: float, outputs: Outputs) -> NoReturn:
    """Raise ``WorkerError`` for ranks that did not answer in time. ``outputs`` end with stacks of threads.

    Args:
        silent: Plans of the ranks that did not answer.
        world_size: Number of ranks.
        timeout_s: Time limit that was exceeded (seconds).
        outputs: Recent output of all ranks, with the stacks of their threads.
    """
    names = ", ".join(f"{_name_rank(plan, world_size)} ({plan.device})" for plan in silent)
    raise WorkerError(
        f"{names} did not answer within {timeout_s:g} s; the ranks were ended", sections=_sections(outputs)
    )


def raise_first_cause(
    failures: Sequence[Failure], world_size: int, outputs: Outputs, silent: Sequence[RankPlan] = ()
) -> NoReturn:
    """Raise the error that caused the others, with one line about each other failure at its end.

    A rank in a collective often reports a lost peer before the end of that peer is detected, so such echoes
    come last. Errors precede outcomes of pytest: if one rank skips and another fails, the test has failed.

    Args:
        failures: All failures, at least one.
        world_size: Number of ranks.
        outputs: Recent output of all ranks.
        silent: Ranks that had not answered when the group was ended.

    Raises:
        OutcomeInRank: The first cause is a skip, an xfail or the end of the run.
        LLEnergyError: The first cause is an error of this package, whose message suffices.
        WorkerError: The first cause is any other error, or the death of a rank.
    """
    first = min(failures, key=lambda each: (each.is_outcome, each.is_echo, each.time_ns))
    report = first.report
    if report.get("outcome") and report["outcome"] != "Failed":
        reason = f"{report['reason']}{_describe_silent(silent)}"
        raise OutcomeInRank(report["outcome"], reason, report.get("exit_code"))
    if first.host_lost is not None:
        raise _lost_host_error(failures, first, world_size, outputs)
    where = f"{_name_rank(first.plan, world_size)} ({first.plan.device}, pid {first.pid})"
    own_class = getattr(errors, report["error_class"], None) if report.get("error_class") else None
    if own_class is not None and not issubclass(own_class, WorkerError):
        if world_size == 1:
            where = "" if first.plan.host == LOCALHOST else first.plan.host
        error = own_class(f"{where}: {report['reason']}" if where else report["reason"])
        if isinstance(error, errors.ServerError):
            error.sections = _sections(outputs)
        raise error
    # The output of the failed rank comes first.
    ordered = sorted(outputs, key=lambda output: output[0].rank != first.plan.rank)
    traceback = str(report.get("traceback", "")).rstrip()
    details = "\n\n".join(filter(None, (traceback, _describe_others(failures, first))))
    raise WorkerError(f"{where}: {report['message']}", details, sections=_sections(ordered))


def _lost_host_error(
    failures: Sequence[Failure], first: Failure, world_size: int, outputs: Outputs
) -> WorkerError:
    """Return one error for all ranks of a host that is lost."""
    there = [each for each in failures if each.host_lost == first.host_lost]
    numbers = sorted(each.plan.rank for each in there)
    ranks = f"{'rank' if len(there) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
    others = _describe_others([each for each in failures if each not in there], first)
    message = f"{first.host_lost}; {ranks} of {world_size} ended with it"
    return WorkerError(message, others, sections=_sections(outputs))


def _describe_silent(silent: Sequence[RankPlan]) -> str:
    """Return a suffix for the reason of a skip that names unfinished ranks, which might have failed."""
    if not silent:
        return ""
    ranks = ", ".join(str(plan.rank) for plan in silent)
    return f" ({'rank' if len(silent) == 1 else 'ranks'} {ranks} still at work, and ended)"


def _describe_others(failures: Sequence[Failure], first: Failure) -> str:
    """Return one line about all other failures. Ranks that only lost a peer share one message."""
    alike: dict[tuple[str, str], list[Failure]] = {}
    for each in sorted(failures, key=lambda failure: failure.time_ns):
        if each is not first:
            when = "later" if each.time_ns >= first.time_ns else "earlier"
            alike.setdefault((when, "a lost peer" if each.is_echo else each.first_line), []).append(each)
    return "; ".join(_describe_alike(when, group) for (when, _), group in alike.items())


def _describe_alike(when: str, alike: Sequence[Failure]) -> str:
    ranks = ", ".join(str(each.plan.rank) for each in alike)
    shown = textwrap.shorten(alike[0].first_line, OTHERS_CHARACTERS, placeholder=" …")
    return f"{'rank' if len(alike) == 1 else 'ranks'} {ranks} {when}: {shown}"


def _sections(outputs: Outputs) -> tuple[tuple[str, str], ...]:
    return tuple((f"output of rank {plan.rank}", "\n".join(lines)) for plan, lines in outputs if lines)
