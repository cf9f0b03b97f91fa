# SPDX-License-Identifier: Apache-2.0
"""Merge several reports into one: shards of a suite, resumed runs, hosts of one kind.

A report has one commit and one kind of machine. Reports that differ in these are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report, RunInfo, Source


class NamedReport(NamedTuple):
    """A report, and the name by which messages call it."""

    origin: str
    report: Report


def merge_reports(parts: Sequence[NamedReport]) -> Report:
    """Merge reports, with records in the given order; equal records are kept once.

    Other commits or kinds of machine, and other values for a test, raise ``ReportError``.
    """
    for part in parts:
        _check_alike(parts[0], part)
    first, reports = parts[0].report, [part.report for part in parts]
    environments = [report.environment for report in reports if report.environment is not None]
    return msgspec.structs.replace(
        first,
        run=_merge_runs([report.run for report in reports]),
        source=_merge_sources([report.source for report in reports]),
        environment=_merge_environments(environments) if environments else None,
        records=_merge_records(parts),
        baseline=first.baseline if all(each.baseline == first.baseline for each in reports) else None,
    )


def _merge_environments(environments: Sequence[Environment]) -> Environment:
    """Merge environments of one kind of machine, keeping all boards, hosts, names and versions."""
    first = environments[0]
    names = dict.fromkeys(name for each in environments for name in each.packages)
    hosts = {name: host for each in environments for name, host in each.cluster_hosts.items()}
    return msgspec.structs.replace(
        first,
        host=msgspec.structs.replace(first.host, name=_join(each.host.name for each in environments)),
        gpus=list({board.uuid: board for each in environments for board in each.gpus}.values()),
        driver=_join(each.driver for each in environments) or None,
        python=_join(each.python for each in environments),
        packages={name: _join(each.packages.get(name, "none") for each in environments) for name in names},
    ).with_hosts(hosts)


def _join(values: Iterable[str | None]) -> str:
    """Return the distinct values, such as ``2.9, 2.8``."""
    return ", ".join(dict.fromkeys(value for value in values if value))


def _check_alike(one: NamedReport, other: NamedReport) -> None:
    commits = one.report.source.commit, other.report.source.commit
    if commits[0] != commits[1]:
        raise ReportError(
            f"{one.origin} has commit {commits[0]}, {other.origin} has {commits[1]}, and a report has one "
            "commit; compare them with llenergy compare"
        )
    here, there = one.report.environment, other.report.environment
    if (here is None) != (there is None):
        unknown = one if here is None else other
        raise ReportError(f"{unknown.origin} does not name its machine; merge it separately")
    if here is not None and there is not None and here.key != there.key:
        raise ReportError(
            f"{one.origin} and {other.origin} ran on different hardware ({here.host.name} and "
            f"{there.host.name}), and a report has one kind; merge them separately"
        )


def _merge_records(parts: Sequence[NamedReport]) -> list[Record]:
    merged: dict[tuple[str, int], tuple[Record, str]] = {}
    for part in parts:
        for record in part.report.records:
            first, origin = merged.setdefault((record.id, record.attempt), (record, part.origin))
            if first != record:
                raise ReportError(
                    f"{record.id} is in {origin} and, with other values, in {part.origin} (attempt "
                    f"{record.attempt}); leave one of them out"
                )
    return [record for record, _ in merged.values()]


def _merge_runs(runs: Sequence[RunInfo]) -> RunInfo:
    """Merge runs into one from the first start to the last end. Parts of one run keep its id."""
    ids = sorted({run.id for run in runs})
    ends = [run.finished_at for run in runs if run.finished_at is not None]
    statuses = [run.exit_status for run in runs if run.exit_status is not None]
    digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
    return RunInfo(
        id=ids[0] if len(ids) == 1 else f"merged-{digest}",
        started_at=min(run.started_at for run in runs),
        finished_at=max(ends) if len(ends) == len(runs) else None,
        complete=all(run.complete for run in runs),
        argv=runs[0].argv,
        exit_status=max(statuses) if len(statuses) == len(runs) else None,
    )


def _merge_sources(sources: Sequence[Source]) -> Source:
    """Merge sources of one commit: dirty if any is dirty, else unknown if any is unknown, else clean."""
    states = {source.dirty for source in sources}
    branches = {source.branch for source in sources}
    return Source(
        commit=sources[0].commit,
        branch=sources[0].branch if len(branches) == 1 else None,
        dirty=True if True in states else None if None in states else False,
    )
