# SPDX-License-Identifier: Apache-2.0
"""Error reports of ranks: find the first cause, and show it with the output of all ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_llenergy import errors, real_time
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.plan import LOCALHOST, RankPlan

#: How gloo (transport/tcp/pair.cc) and NCCL (ncclRemoteError, ncclResult_t) report that a peer is gone.
PEER_LOST = re.compile(
    r"connection (was )?(reset|closed|refused) by (remote )?peer|connection reset|broken pipe|ncclRemoteError"
    r"|remote process exited",
    re.IGNORECASE,
)

#: The recent output of each rank.
Outputs = Sequence[tuple[RankPlan, list[str]]]


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: its plan and pid, and its report (see ``server``), or how it died."""

    plan: RankPlan
    pid: int
    report: dict[str, Any]

    @property
    def is_outcome(self) -> bool:
        """Whether the rank skipped, xfailed, or ended the run, rather than failed."""
        return self.report.get("outcome") not in (None, "Failed")

    @property
    def is_echo(self) -> bool:
        """Whether it only reports that another rank is gone. torch's errors about that are RuntimeErrors."""
        return bool(self.report.get("runtime_error", True) and PEER_LOST.search(str(self.report["message"])))


class OutcomeInRank(Exception):  # noqa: N818 - an outcome need not be an error
    """pytest's skip, xfail, fail or exit was raised in a rank; the fixtures raise it again in the test."""

    def __init__(self, outcome: str, reason: str, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.exit_code = exit_code


def describe_death(host: Host, group: str, pid: int) -> dict[str, Any]:
    """Return the report of the rank with this pid, which ended without an answer."""
    report: dict[str, Any] = {"time_ns": real_time.monotonic_ns()}
    try:
        code = host.exit_code(group, pid)
    except WorkerError as error:
        return {**report, "message": host.lost or str(error), "host_lost": host.lost}
    message = f"ended with exit code {code} and no result"
    if code is None:
        message = "closed its connection"
    elif code < 0:
        name = signal_name(-code)
        message = f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    return {**report, "message": message}


def signal_name(number: int) -> str:
    """Return a name such as ``SIGSEGV``, or ``signal 40`` for a signal without one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def raise_hang(silent: Sequence[RankPlan], timeout_s: float, outputs: Outputs) -> NoReturn:
    """Raise ``WorkerError`` for ranks that did not answer in time. ``outputs`` end with stacks of threads."""
    names = ", ".join(f"{plan.name} ({plan.device})" for plan in silent)
    message = f"{names} did not answer within {timeout_s:g} s; the ranks were ended"
    raise WorkerError(message, sections=_sections(outputs))


def raise_first_cause(failures: Sequence[Failure], outputs: Outputs) -> NoReturn:
    """Raise the error that caused the others, with one line about these at its end.

    A rank in a collective often reports a lost peer before the end of that peer is detected, so such echoes
    come last. Errors precede outcomes of pytest: if one rank skips and another fails, the test has failed.

    An error of this package keeps its class, and its message suffices; all others are ``WorkerError``.
    """
    first = min(failures, key=lambda each: (each.is_outcome, each.is_echo, each.report["time_ns"]))
    report, plan = first.report, first.plan
    if first.is_outcome:
        raise OutcomeInRank(report["outcome"], report["reason"], report["exit_code"])
    if report.get("host_lost") is not None:
        # One error for all of its ranks.
        there = [each.plan.rank for each in failures if each.report.get("host_lost")]
        ranks = f"{'rank' if len(there) == 1 else 'ranks'} {', '.join(map(str, sorted(there)))}"
        message = f"{report['host_lost']}; {ranks} of {plan.world_size} ended with it"
        raise WorkerError(message, sections=_sections(outputs))
    where = f"{plan.name} ({plan.device}, pid {first.pid})"
    own_class = getattr(errors, report.get("error_class") or "", None)
    if own_class is not None and not issubclass(own_class, WorkerError):
        if plan.world_size == 1:
            where = "" if plan.host == LOCALHOST else plan.host
        error = own_class(f"{where}: {report['reason']}" if where else report["reason"])
        if isinstance(error, errors.ServerError):
            error.sections = _sections(outputs)
        raise error
    # The output of the failed rank comes first.
    ordered = sorted(outputs, key=lambda output: output[0].rank != plan.rank)
    details = [report.get("traceback", "").rstrip()]
    for each in failures:
        if each is not first and not each.is_echo:
            message = str(each.report["message"]).partition("\n")[0]
            details.append(f"rank {each.plan.rank}: {message}")
    raise WorkerError(
        f"{where}: {report['message']}", "\n\n".join(filter(None, details)), sections=_sections(ordered)
    )


def _sections(outputs: Outputs) -> tuple[tuple[str, str], ...]:
    return tuple((f"output of rank {plan.rank}", "\n".join(lines)) for plan, lines in outputs if lines)
