# SPDX-License-Identifier: Apache-2.0
"""Join the sessions of each side into one report, and pair the tests of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pytest_llenergy.compare.comparability import device_differences, workload_differences
from pytest_llenergy.compare.pairing import match_renamed, select_last_attempts
from pytest_llenergy.record.base import Primitive, Status
from pytest_llenergy.record.custom_metrics import join_custom
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.metrics import compute_metrics, energy_per_flop
from pytest_llenergy.record.record import Flag, Record, Round, flag_kind
from pytest_llenergy.record.report import Report, Session, SideName


@dataclass(frozen=True)
class SessionRecord:
    """The record of one test in one session; ``number`` counts all sessions from 1."""

    number: int
    record: Record
    environment: Environment | None

    @property
    def usable(self) -> bool:
        """Whether the test ran as it should, even if its rounds are not valid measurements."""
        record = self.record
        return record.counts or (record.status == "invalid" and bool(record.rounds) and not record.is_spoiled)

    @property
    def over_budget(self) -> bool:
        """Whether the test exceeded its budget without being marked as an expected failure.

        The reason is the only sign that pytest gives of an expected failure.
        """
        return self.record.failed_gate and not (self.record.reason or "").startswith("xfail")


class SideSessions:
    """The measurements of one side so far, in session order."""

    def __init__(self, side: SideName) -> None:
        self.side = side
        self.sessions: list[Session] = []
        self.reports: list[Report] = []
        self._parts: dict[str, list[SessionRecord]] = {}

    def add(self, number: int, reports: Sequence[Report]) -> int:
        """Add a session: one report for each attempt at it.

        A test that an attempt measured before it was stopped keeps that measurement.

        Returns:
            The number of tests in the session.
        """
        found: dict[str, SessionRecord] = {}
        for report in reports:
            for name, record in select_last_attempts(report.records, report.run.id).items():
                part = SessionRecord(number, record, report.environment)
                if name not in found or not found[name].record.counts:
                    found[name] = part
            self.reports.append(report)
            run = report.run
            self.sessions.append(
                Session(
                    side=self.side,
                    run_id=run.id,
                    started_at=run.started_at,
                    finished_at=run.finished_at,
                    exit_status=run.exit_status,
                )
            )
        for name, part in found.items():
            self._parts.setdefault(name, []).append(part)
        return len(found)

    @property
    def parts(self) -> Mapping[str, Sequence[SessionRecord]]:
        """The sessions of each test, by its node id."""
        return self._parts

    @property
    def undecidable(self) -> set[str]:
        """Tests that failed, were skipped or crashed, or have no rounds: more sessions would not help."""
        return {
            name for name, parts in self._parts.items() if not parts[-1].usable or not parts[-1].record.rounds
        }

    def report(self, anchors: Mapping[str, SessionRecord]) -> Report | None:
        """Join all sessions into one report.

        Args:
            anchors: For each node id the session whose devices and meters the others must match.

        Returns:
            The report, or ``None`` before the first session.
        """
        if not self.reports:
            return None
        first = self.reports[0]
        statuses = [each.run.exit_status for each in self.reports if each.run.exit_status is not None]
        run = msgspec.structs.replace(
            first.run,
            finished_at=self.reports[-1].run.finished_at,
            # An unfinished session is completed by another attempt, or stops the comparison.
            complete=True,
            exit_status=max(statuses, default=None),
        )
        # A tight budget is exceeded now and then by either side. The change is to blame only if the baseline
        # never exceeds it and the head mostly does.
        share = 0.0 if self.side == "base" else 0.5
        records = [
            _join_record(parts, anchors.get(name, parts[0]), share) for name, parts in self._parts.items()
        ]
        return msgspec.structs.replace(first, run=run, records=records, baseline=None)


def _join_record(parts: Sequence[SessionRecord], anchor: SessionRecord, share: float) -> Record:
    """Join the sessions of one test; it is over budget if more than ``share`` of its sessions were."""
    rounds = [round_ for part in parts for round_ in _mark_rounds(part, anchor)]
    spoiled = next((part for part in parts if not part.usable), None)
    if spoiled is not None:
        reason = f"session {spoiled.number}: {spoiled.record.reason or spoiled.record.status}"
        # Measured in other sessions, so it is no test that never worked, and may not pass as new or removed.
        status: Status = "invalid" if any(part.usable for part in parts) else spoiled.record.status
        return msgspec.structs.replace(
            spoiled.record,
            attempt=1,
            status=status,
            reason=reason,
            rounds=rounds,
            # They summarize rounds that do not count.
            metrics={},
            custom={},
            comparisons=[],
            failed_gate=False,
        )
    first = parts[0].record
    if not rounds:
        return msgspec.structs.replace(first, failed_gate=parts[0].over_budget)
    coverage = min((meter.coverage for meter in first.meters), default=1.0)
    # The peak memory belongs to no round; that of any session will do.
    peak = first.metrics.get("peak_memory_bytes")
    metrics = compute_metrics(rounds, None, coverage)
    metrics |= {"peak_memory_bytes": peak} if peak is not None else {}
    energy = metrics["energy_j"]
    flops = first.metrics.get("flops")
    if flops is not None:
        metrics |= {"flops": flops, "energy_per_flop_j": energy_per_flop(energy, flops)}
    added, custom = join_custom([part.record for part in parts])
    metrics |= added
    status = "measured" if energy.value is not None else "invalid"
    why = None if energy.value is not None else energy.reason
    over = [part for part in parts if part.over_budget]
    broken = status == "measured" and len(over) > share * len(parts)
    if broken:
        status, why = "failed", f"{len(over)} of {len(parts)} sessions: {over[0].record.reason}"
    return msgspec.structs.replace(
        first,
        attempt=1,
        status=status,
        reason=why,
        # Those of one session would be taken for all.
        times=None,
        rounds=rounds,
        metrics=metrics,
        custom=custom,
        comparisons=[],
        failed_gate=broken,
        flags=_join_flags(parts),
    )


def _mark_rounds(part: SessionRecord, anchor: SessionRecord) -> list[Round]:
    """Return the rounds with their session, flagged as invalid if they do not match the anchor."""
    why = _incompatibility(part, anchor)
    flag = Flag(name="elsewhere", severity="invalid", detail=f"session {part.number}: {why}")
    added = [flag] if why else []
    return [
        msgspec.structs.replace(each, flags=[*each.flags, *added], session=part.number)
        for each in part.record.rounds
    ]


def _incompatibility(part: SessionRecord, anchor: SessionRecord) -> str:
    """Why a session does not match the anchor; empty if it does."""
    if part is anchor:
        return ""
    record, first = part.record, anchor.record
    if sorted(record.devices) != sorted(first.devices):
        return f"ran on {_device_names(record)}, session {anchor.number} on {_device_names(first)}"
    if part.environment != anchor.environment or record.meters != first.meters:
        differences = device_differences(first, record, anchor.environment, part.environment)
        if differences:
            return f"differs from session {anchor.number} ({'; '.join(differences)})"
    return ""


def _device_names(record: Record) -> str:
    return ", ".join(record.devices) or "no device"


def _join_flags(parts: Sequence[SessionRecord]) -> list[Flag]:
    """Join flags of one kind, with the number of sessions if not all have the flag."""
    seen: dict[tuple[str, str, str], list[Flag]] = {}
    for part in parts:
        for kind, flag in {flag_kind(flag): flag for flag in reversed(part.record.flags)}.items():
            seen.setdefault(kind, []).append(flag)
    return [
        flags[0]
        if len(flags) == len(parts)
        else msgspec.structs.replace(
            flags[0], detail=f"{len(flags)} of {len(parts)} sessions: {flags[0].detail}"
        )
        for flags in seen.values()
    ]


def list_excluded_rounds(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return why rounds were excluded from the comparison, by test id."""
    return {
        record.id: reasons
        for record in records
        if (
            reasons := [
                flag.detail
                for each in record.rounds
                for flag in each.flags
                if (flag.name, flag.severity) == ("elsewhere", "invalid")
            ]
        )
    }


def list_workload_changes(parts: Sequence[SessionRecord]) -> list[str]:
    """Return how the workload of a test first changed between sessions; empty if it did not."""
    for part in parts[1:]:
        if (
            part.usable
            and part.record.rounds
            and (found := workload_differences(parts[0].record, part.record))
        ):
            return [f"session {part.number}: {line}" for line in found]
    return []


@dataclass(frozen=True)
class PairedNames:
    """The common name of each test of either side, by its node id, and the tests without a partner."""

    base: Mapping[str, str]
    head: Mapping[str, str]
    unpaired: tuple[str, ...] = ()


def pair_by_id(base: Mapping[str, Record], head: Mapping[str, Record]) -> PairedNames:
    """Pair the tests of two commits by their node ids; renamed ones have the id of the head."""
    ids = {old: new for new, old in match_renamed(base, head).items()}
    return PairedNames({name: ids.get(name, name) for name in base}, {name: name for name in head})


def pair_by_parameters(base: Mapping[str, Record], head: Mapping[str, Record]) -> PairedNames:
    """Pair the tests of two sets of options by node id, or else by the parameters that both sides have.

    A parameter of a function that has no value in common on the two sides, such as a dtype, was changed by
    the options. Tests that are alike in all others are a pair if they are the only ones, and are named by
    these: ``test_decode[8]``.
    """
    names = ({name: name for name in base if name in head}, {name: name for name in head if name in base})
    rest = [{name: record for name, record in side.items() if name not in names[0]} for side in (base, head)]
    taken, unpaired = set(names[0]), list[str]()
    for function in dict.fromkeys(name.partition("[")[0] for side in rest for name in side):
        sides = [
            {name: each.params for name, each in side.items() if name.partition("[")[0] == function}
            for side in rest
        ]
        changed = _changed_parameters(*sides)
        groups: dict[tuple[tuple[str, Primitive], ...], tuple[list[str], list[str]]] = {}
        for number, side in enumerate(sides):
            for name, params in side.items():
                key = tuple(sorted((each, value) for each, value in params.items() if each not in changed))
                groups.setdefault(key, ([], []))[number].append(name)
        for key, found in groups.items():
            values = "-".join(str(value) for _, value in key)
            shared = f"{function}[{values}]" if key else function
            paired = len(found[0]) == len(found[1]) == 1 and shared not in taken
            for ids, tests in zip(names, found, strict=True):
                ids.update({name: shared if paired else name for name in tests})
            taken.add(shared)
            unpaired += [] if paired else [*found[0], *found[1]]
    return PairedNames(*names, tuple(unpaired))


def _changed_parameters(
    base: Mapping[str, Mapping[str, Primitive]], head: Mapping[str, Mapping[str, Primitive]]
) -> set[str]:
    """Return the parameters without a value in common."""
    values = [
        {name: {params.get(name) for params in side.values()} for name in _names_of(base, head)}
        for side in (base, head)
    ]
    return {name for name, found in values[0].items() if found.isdisjoint(values[1][name])}


def _names_of(*sides: Mapping[str, Mapping[str, Primitive]]) -> set[str]:
    return {name for side in sides for params in side.values() for name in params}


def unpaired_note(names: Sequence[str]) -> str:
    """Return a note that lists tests that could not be paired."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"not paired, because the options changed their ids and no single other test matches: {shown}"
