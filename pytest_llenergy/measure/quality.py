# SPDX-License-Identifier: Apache-2.0
"""Flags of rounds: what a reader must know about them. An ``invalid`` round counts in no metric."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.devices.processes import find_foreign_processes, process_tree, sees_all_pids
from pytest_llenergy.energy.attribution import is_busy
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.record import Flag, Round
from pytest_llenergy.record.round_statistics import linear_drift
from pytest_llenergy.record.text import one_line, shorten

#: A round is imprecise above this relative standard uncertainty.
IMPRECISE = 0.10

#: An energy this many standard uncertainties below zero is impossible.
BELOW_ZERO = 3.0

#: A round is throttled if a board is held back for more than this share of it.
THROTTLED = 0.01

#: A change over the rounds is a drift if it is at least this large and its t value this high.
DRIFT, DRIFT_T = 0.02, 4.0

#: Most characters of an error in a flag.
MAX_DETAIL = 300


def use_flags(measured: MeasuredRound) -> list[Flag]:
    """Return the flags of a round that others raise who use the CPU or the boards, and of its boards."""
    duration_s = measured.timeline.duration_s
    return _cpu_flags(measured, duration_s) + _board_flags(measured, duration_s)


def drift_flags(rounds: Sequence[Round]) -> list[Flag]:
    """Return a flag if the energy of an iteration rises or falls from round to round."""
    energies = [round_.energy_j / round_.iterations for round_ in rounds if round_.energy_j is not None]
    drift = linear_drift(energies)
    if drift is None or abs(drift[0]) < DRIFT or abs(drift[1]) < DRIFT_T:
        return []
    change, t = drift
    detail = f"energy changed by {change:+.1%} over {len(energies)} rounds (t = {t:.1f}); warm up longer"
    return [Flag(name="uneven-rounds", severity="warning", detail=detail)]


def energy_flags(total: WindowEnergy) -> list[Flag]:
    """Return the flags of a missing, impossible or imprecise energy."""
    if total.energy_j is None or total.u_j is None:
        # Only a warning: the times and counts of the round are valid.
        return [Flag(name="unmeasured", severity="warning", detail=total.reason or "no reading")]
    if total.energy_j <= -BELOW_ZERO * total.u_j:
        detail = f"the counters give {total.energy_j:.3g} J, which is impossible"
        # It counts: rounds that are as much too high are not recognised, so that dropping only those that are
        # too low would raise the metrics.
        return [Flag(name="doubtful", severity="warning", detail=detail)]
    if total.u_j > IMPRECISE * total.energy_j:
        share = f"{total.u_j / total.energy_j:.0%}" if total.energy_j > 0 else "more than all"
        detail = f"standard uncertainty {share} of the energy"
        return [Flag(name="imprecise", severity="warning", detail=detail)]
    return []


def unfinished_flag(error: BaseException) -> Flag:
    """Return the flag of a round whose work failed: its joules end there, and are of no whole work."""
    return Flag(name="unfinished", severity="invalid", detail=f"the work failed: {_describe(error)}")


def _describe(error: BaseException) -> str:
    """Return the first line of an error, with its type unless it is one of this package."""
    try:
        text, _, _ = str(error).partition("\n")
    except Exception:  # code of the user
        text = ""
    if not isinstance(error, LLEnergyError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shorten(one_line(text), MAX_DETAIL)


def _cpu_flags(measured: MeasuredRound, duration_s: float) -> list[Flag]:
    used = (
        (measured.cpu.other_s, "other processes used"),
        (measured.cpu.stolen_s, "the hypervisor gave other guests"),
    )
    return [
        Flag(name="contended", severity="warning", detail=f"{text} {cpu_s / duration_s:.2f} cores")
        for cpu_s, text in used
        if is_busy(cpu_s, duration_s)
    ]


def _board_flags(measured: MeasuredRound, duration_s: float) -> list[Flag]:
    flags: list[Flag] = []
    servers = measured.timeline.servers
    own_pids = process_tree(os.getpid(), *servers) if servers and measured.after else None
    for uuid, after in (measured.after or {}).items():
        before = (measured.before or {}).get(uuid)
        flags += _throttled_flags(uuid, before, after, duration_s)
        during = [each[uuid] for each in measured.during if uuid in each]
        conditions = [before, *during, after] if before is not None else [*during, after]
        flags += _foreign_flags(uuid, conditions, own_pids)
        flags += _elsewhere_flags(uuid, conditions, own_pids) if own_pids is not None else []
    for uuid in measured.unleased:
        detail = f"{uuid}: the server uses this board too, which the test does not lease; lease all of them"
        flags.append(Flag(name="gpu-processes", severity="invalid", detail=detail))
    return flags


def _throttled_flags(uuid: str, before: Condition | None, after: Condition, duration_s: float) -> list[Flag]:
    earlier = before.throttled_s if before is not None else {}
    held = {
        reason: after_s - earlier[reason]
        for reason, after_s in after.throttled_s.items()
        if reason in earlier and after_s - earlier[reason] > THROTTLED * duration_s
    }
    if not held:
        return []
    shares = ", ".join(f"{reason} {min(1.0, held_s / duration_s):.0%}" for reason, held_s in held.items())
    return [Flag(name="throttled", severity="warning", detail=f"{uuid}: held back by {shares} of the round")]


def _elsewhere_flags(uuid: str, conditions: Sequence[Condition], own_pids: Collection[int]) -> list[Flag]:
    """Return a flag if the measured server has no process on a leased board.

    Its orphans are among ``own_pids`` too, because the supervisor of the ranks adopts them.
    """
    listed = [condition.processes for condition in conditions if condition.processes is not None]
    if not listed or not sees_all_pids():
        return []
    pids = {each.pid for several in listed for each in several}
    # One that has ended may have been the server's.
    if pids & (set(own_pids) - {os.getpid()}) or not all(Path(f"/proc/{pid}").exists() for pid in pids):
        return []
    detail = (
        f"{uuid}: the server has no process on this board; lease only boards that it uses, or let it use "
        "them all, such as with --tensor-parallel-size {gpus}"
    )
    return [Flag(name="gpu-processes", severity="invalid", detail=detail)]


def _foreign_flags(
    uuid: str, conditions: Sequence[Condition], own_pids: Collection[int] | None = None
) -> list[Flag]:
    unknown: str | None = None
    for condition in conditions:
        others = find_foreign_processes(condition.processes, own_pids)
        if isinstance(others, str):
            unknown = others
        elif others:
            names = ", ".join(f"{process.pid} ({process.name or 'name unknown'})" for process in others)
            detail = f"{uuid} is used by another process: {names}"
            return [Flag(name="gpu-processes", severity="invalid", detail=detail)]
    if unknown is None:
        return []
    detail = f"{uuid}: other processes are unknown: {unknown}"
    return [Flag(name="gpu-processes", severity="warning", detail=detail)]
