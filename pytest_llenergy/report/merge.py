# SPDX-License-Identifier: Apache-2.0
"""Merge several reports into one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report, RunInfo, Source

# One environment of several: those of hosts of one kind, or of several Pythons on one host.


def merge_environments(known: Sequence[Environment]) -> Environment:
    """Of one kind of machine: every board, so that records find theirs, and every name."""
    boards = {board.uuid: board for each in known for board in each.gpus}
    names = list(dict.fromkeys(name for each in known for name in each.packages))
    return msgspec.structs.replace(
        known[0],
        host=msgspec.structs.replace(known[0].host, name=_joined(each.host.name for each in known)),
        gpus=list(boards.values()),
        driver=_joined(each.driver for each in known) or None,
        python=_joined(each.python for each in known),
        packages={name: _joined(each.packages.get(name, "none") for each in known) for name in names},
    )


def describe_differences(one: Environment, other: Environment) -> str:
    """What makes two machines different ones, in words."""
    here, there = _facts(one), _facts(other)
    return "; ".join(f"{name}: {here[name]} -> {there[name]}" for name in here if here[name] != there[name])


def _facts(environment: Environment) -> dict[str, str]:
    host = environment.host
    boards = sorted(f"{board.name} {board.power_limit_w or '?'} W" for board in environment.gpus)
    return {
        "CPU": f"{host.cpu_model} ({host.machine})",
        "cores": str(host.logical_cpus),
        "memory": f"{round(host.memory_bytes / 2**30)} GiB",
        "GPUs": ", ".join(boards) or "none",
        "GPUs missing": str(len(environment.gpus_missing)),
    }


def _joined(values: Iterable[str | None]) -> str:
    """Each once, ``2.9, 2.8``."""
    return ", ".join(dict.fromkeys(value for value in values if value))


# One report of several: shards of a suite, runs that were killed and taken up again, hosts of one kind.
#
# A report is of one commit and one kind of machine. What came from others does not belong in one table, so it
# is refused and told what differs.


@dataclass(frozen=True)
class NamedReport:
    """A report, and how messages name it."""

    origin: str
    report: Report


def merge_reports(parts: Sequence[NamedReport]) -> Report:
    """One report of all, records in the order given. A record that is there twice is kept once.

    Raises ``ReportError`` for parts of several commits or kinds of machines, and for a test that two parts
    have with other figures.
    """
    first = parts[0].report
    for part in parts[1:]:
        _check_source(parts[0], part)
        _check_machine(parts[0], part)
    records = _records(parts)
    reports = [part.report for part in parts]
    known = [report.environment for report in reports if report.environment is not None]
    return msgspec.structs.replace(
        first,
        run=_run([report.run for report in reports]),
        source=_source([report.source for report in reports]),
        environment=merge_environments(known) if known else None,
        records=records,
        baseline=first.baseline if all(each.baseline == first.baseline for each in reports) else None,
    )


def _records(parts: Sequence[NamedReport]) -> list[Record]:
    found: dict[tuple[str, int], tuple[Record, str]] = {}
    for part in parts:
        for record in part.report.records:
            before = found.setdefault((record.id, record.attempt), (record, part.origin))
            if before[0] != record:
                raise ReportError(
                    f"{record.id} is in {before[1]} and, with other figures, in {part.origin} (attempt "
                    f"{record.attempt}): which of them counts would be chance; leave one out"
                )
    return [record for record, _ in found.values()]


def _check_source(one: NamedReport, other: NamedReport) -> None:
    commits = one.report.source.commit, other.report.source.commit
    if commits[0] != commits[1]:
        raise ReportError(
            f"{one.origin} is of commit {commits[0]}, {other.origin} of {commits[1]}: a report is of one "
            "commit; llenergy compare holds two against each other"
        )


def _check_machine(one: NamedReport, other: NamedReport) -> None:
    here, there = one.report.environment, other.report.environment
    if here is None and there is None:
        return
    if here is None or there is None:
        raise ReportError(
            f"{(one if here is None else other).origin} does not say what it ran on; merge it apart"
        )
    if here.key != there.key:
        raise ReportError(
            f"{one.origin} and {other.origin} are of different hardware "
            f"({describe_differences(here, there)}): a report is of one kind of machine; merge them apart"
        )


def _run(runs: Sequence[RunInfo]) -> RunInfo:
    """From the first start to the last end. Parts of one run keep its id; several make one of their ids."""
    ids = sorted({run.id for run in runs})
    ends = [run.finished_at for run in runs]
    statuses = [run.exit_status for run in runs]
    known_ends = [end for end in ends if end is not None]
    known = [status for status in statuses if status is not None]
    joined = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
    return RunInfo(
        id=ids[0] if len(ids) == 1 else f"merged-{joined}",
        started_at=min(run.started_at for run in runs),
        finished_at=max(known_ends) if len(known_ends) == len(ends) else None,
        complete=all(run.complete for run in runs),
        argv=runs[0].argv,
        exit_status=max(known) if len(known) == len(statuses) else None,
    )


def _source(sources: Sequence[Source]) -> Source:
    """Changed where one of them was; not known where one is not known and none was."""
    states = {source.dirty for source in sources}
    dirty = True if True in states else None if None in states else False
    branches = {source.branch for source in sources}
    return Source(
        commit=sources[0].commit, branch=sources[0].branch if len(branches) == 1 else None, dirty=dirty
    )
