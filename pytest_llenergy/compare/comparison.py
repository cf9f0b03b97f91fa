# SPDX-License-Identifier: Apache-2.0
"""Compare the tests of two reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import msgspec

from pytest_llenergy.compare.comparability import (
    comparison_notes,
    describe_devices,
    device_differences,
    workload_differences,
)
from pytest_llenergy.compare.metrics import METRICS, Direction
from pytest_llenergy.compare.statistics import (
    Estimate,
    Rule,
    Sample,
    compare_samples,
    correct_multiple_comparisons,
)
from pytest_llenergy.errors import ReportError
from pytest_llenergy.measure.metrics import FIGURES, Value, applies_to_rounds, round_values
from pytest_llenergy.model.base import pause_garbage_collection
from pytest_llenergy.model.comparison import AppliedRule, ComparedReports, Comparison, Side, Verdict
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report

# Which records of two reports belong together.

PER_TOKEN, PER_ITERATION = "energy_per_output_token_j", "energy_j"


def select_last_attempts(records: Sequence[Record], origin: str) -> dict[str, Record]:
    """The record of the last attempt of each test, by id: a rerun replaces what was before it.

    Raises ``ReportError`` for an attempt that is there twice: which of them counts would be chance.
    """
    found: dict[str, Record] = {}
    attempts: dict[str, set[int]] = {}
    for record in records:
        known = len(found)
        before = found.setdefault(record.id, record)
        if len(found) > known:
            continue
        seen = attempts.setdefault(record.id, {before.attempt})
        if record.attempt in seen:
            raise ReportError(
                f"{origin}: {record.id} is there twice (attempt {record.attempt}); "
                "make one report a run, or join them with llenergy merge"
            )
        seen.add(record.attempt)
        if record.attempt > before.attempt:
            found[record.id] = record
    return found


def pair_records(
    base: Mapping[str, Record], head: Mapping[str, Record]
) -> Iterator[tuple[Record | None, Record | None]]:
    """The records of every test of either side: those of ``head`` first, in their order."""
    for name, record in head.items():
        yield base.get(name), record
    for name, record in base.items():
        if name not in head:
            yield record, None


def default_metric(*records: Record | None) -> str:
    """Joules per output token where every side counts tokens, joules otherwise."""
    known = [record for record in records if record is not None and record.rounds]
    if known and all(applies_to_rounds(PER_TOKEN, record.rounds) for record in known):
        return PER_TOKEN
    return PER_ITERATION


def has_measurements(records: Mapping[str, Record]) -> bool:
    """Whether there is a test to compare with."""
    return any(record.counts and record.rounds for record in records.values())


def describe_side(report: Report, origin: str) -> Side:
    """Where a report comes from."""
    return Side(
        origin=origin,
        run_id=report.run.id,
        started_at=report.run.started_at,
        complete=report.run.complete,
        commit=report.source.commit,
        branch=report.source.branch,
        dirty=report.source.dirty,
    )


# One test of two runs: comparable or not, and the verdict; then all tests of two reports.


@dataclass(frozen=True)
class Criterion:
    """A metric, or ``None`` for the usual one of each test, and the rule to judge it by.

    ``gated`` is whether a verdict was asked for that a run can fail by. ``own`` says that the test itself
    asked, by a mark: it must then have the metric, while what is asked of all tests is asked of those that
    have it.
    """

    metric: str | None = None
    rule: Rule = field(default_factory=Rule)
    gated: bool = False
    own: bool = False


@dataclass(frozen=True)
class MeasuredRecord:
    """A record and where it was made."""

    record: Record
    environment: Environment | None


@dataclass(frozen=True)
class _Case:
    """One metric of one test, on the sides that have it."""

    metric: str
    asked: Criterion
    base: Record | None
    head: Record | None
    gated: bool

    def state(self, verdict: Verdict, reason: str, differences: Sequence[str] = ()) -> Comparison:
        """Without a verdict of the rule."""
        return self._with(verdict=verdict, reason=reason, differences=list(differences))

    def judged(self, base: Sample, head: Sample, estimate: Estimate, notes: Sequence[str]) -> Comparison:
        """With what the rule has found."""
        return self._with(
            verdict=estimate.verdict,
            reason=estimate.reason,
            ratio=_finite_or_none(estimate.ratio),
            low=_finite_or_none(estimate.low),
            high=_finite_or_none(estimate.high),
            base=_finite_or_none(median(base.values)),
            head=_finite_or_none(median(head.values)),
            n_base=len(base.values),
            n_head=len(head.values),
            noise=_finite_or_none(estimate.noise),
            detectable=_finite_or_none(estimate.detectable),
            p=_finite_or_none(estimate.p),
            notes=list(notes),
        )

    def _with(self, verdict: Verdict, reason: str, **found: Any) -> Comparison:
        shown = self.head or self.base
        assert shown is not None
        told: dict[str, Any] = {
            "base": _recorded_value(self.base, self.metric),
            "head": _recorded_value(self.head, self.metric),
            **found,
        }
        return Comparison(
            id=shown.id,
            metric=self.metric,
            unit=FIGURES[self.metric].unit,
            verdict=verdict,
            reason=reason,
            better=METRICS[self.metric].better,
            kind=shown.kind,
            rule=_applied_rule(self.asked.rule),
            gated=self.gated,
            base_tokens_per_s=_recorded_value(self.base, "output_tokens_per_s"),
            head_tokens_per_s=_recorded_value(self.head, "output_tokens_per_s"),
            **told,
        )


#: How the verdict on one metric is found: by the record of the head and both samples.
Estimator = Callable[[Record, Sample, Sample, Rule, Direction], Estimate]


def estimate_once(_: Record, base: Sample, head: Sample, rule: Rule, better: Direction) -> Estimate:
    """On all rounds that there are, in one look."""
    return compare_samples(base, head, rule, better)


def compare_records(
    base: MeasuredRecord, head: MeasuredRecord, asked: Criterion, *, across: bool = False
) -> Comparison:
    """The verdict on one metric of one test. Never raises for what was measured.

    ``across`` compares workloads that are not the same, such as two backends, and says in a note what
    differs.
    """
    return _compare_records(base, head, asked, across=across)[0]


def compare_without_baseline(head: Record, asked: Criterion, stopped: str | None = None) -> Comparison:
    """Of a test that the baseline does not have.

    ``stopped`` names a baseline whose run did not come to its end: it may have been about to measure it.
    """
    case = _Case(asked.metric or default_metric(head), asked, None, head, asked.gated)
    if not head.counts:
        return case.state("invalid", _not_measured_reason("head", head))
    if stopped is not None:
        return case.state("invalid", _missing_reason(stopped))
    return case.state("new", "not in the baseline")


def compare_reports(
    base: Report,
    head: Report,
    origins: tuple[str, str],
    asked: Sequence[Criterion],
    *,
    across: bool = False,
    find: Estimator = estimate_once,
) -> ComparedReports:
    """Every test of two reports, for each metric; the correction for many tests is made within a metric.

    Raises ``ReportError`` for a test that is in one report twice.
    """
    stopped = [
        None if report.run.complete else origin for report, origin in zip((base, head), origins, strict=True)
    ]
    comparisons: list[Comparison] = []
    with pause_garbage_collection():
        old = select_last_attempts(base.records, origins[0])
        new = select_last_attempts(head.records, origins[1])
        for each in asked:
            found: list[tuple[Comparison, Estimate | None]] = []
            for before, after in pair_records(old, new):
                if before is None and after is not None:
                    found.append((compare_without_baseline(after, each, stopped[0]), None))
                elif before is not None and after is None:
                    found.append((_removed_test(before, each, stopped[1]), None))
                elif before is not None and after is not None:
                    sides = MeasuredRecord(before, base.environment), MeasuredRecord(after, head.environment)
                    found.append(_compare_records(*sides, each, across=across, find=find))
            comparisons += _correct_comparisons(found)
    sides_of = describe_side(base, origins[0]), describe_side(head, origins[1])
    # Most records have the same devices.
    devices = {(*each.devices, *each.meters): each for each in new.values() if each.rounds}
    lines = (describe_devices(record, head.environment) for record in devices.values())
    return ComparedReports(
        base=sides_of[0],
        head=sides_of[1],
        comparisons=comparisons,
        devices=list(dict.fromkeys(lines)),
        notes=[incomplete_run_note(side.origin) for side in sides_of if not side.complete],
    )


def incomplete_run_note(origin: str) -> str:
    """What to know of a run that was stopped or killed."""
    return f"{origin} is of a run that did not come to its end: what it had not measured is missing"


def _missing_reason(origin: str) -> str:
    return f"missing in {origin}, whose run did not come to its end"


def _removed_test(base: Record, asked: Criterion, stopped: str | None) -> Comparison:
    case = _Case(asked.metric or default_metric(base), asked, base, None, asked.gated)
    if stopped is not None:
        return case.state("invalid", _missing_reason(stopped))
    return case.state("removed", "only in the baseline")


def _compare_records(
    base: MeasuredRecord,
    head: MeasuredRecord,
    asked: Criterion,
    *,
    across: bool,
    find: Estimator = estimate_once,
) -> tuple[Comparison, Estimate | None]:
    old, new = base.record, head.record
    metric = asked.metric or default_metric(old, new)
    figure = FIGURES[metric]
    case = _Case(metric, asked, old, new, asked.gated)
    for side, record in (("base", old), ("head", new)):
        if not record.counts:
            return case.state("invalid", _not_measured_reason(side, record)), None
        if not record.rounds:
            told = f"{side} has windows of energy_meter only, and no rounds to compare"
            return case.state("invalid", told), None
    if not asked.own and not (applies_to_rounds(metric, old.rounds) or applies_to_rounds(metric, new.rounds)):
        return _Case(metric, asked, old, new, gated=False).state("invalid", figure.missing), None
    if figure.is_energy and old.kind != new.kind:
        told = f"base is {old.kind or 'without a meter'}, head is {new.kind or 'without a meter'}"
        return case.state("not comparable", told, [f"meter.kind: {old.kind} -> {new.kind}"]), None
    differences = device_differences(old, new, base.environment, head.environment, meters=figure.is_energy)
    if differences:
        return case.state("not comparable", _one_line("other devices", differences), differences), None
    differences = workload_differences(old, new)
    if differences and not across:
        return case.state("not comparable", _one_line("another workload", differences), differences), None
    samples = []
    for side, record in (("base", old), ("head", new)):
        values, reason = round_values(metric, record.rounds)
        if not values:
            return case.state("invalid", f"{side} has no {metric}: {reason}"), None
        samples.append(_make_sample(values))
    estimate = find(new, samples[0], samples[1], asked.rule, METRICS[metric].better)
    notes = comparison_notes(old, new, base.environment, head.environment)
    notes += [f"another workload: {line}" for line in differences]
    return case.judged(samples[0], samples[1], estimate, notes), estimate


def _correct_comparisons(found: Sequence[tuple[Comparison, Estimate | None]]) -> list[Comparison]:
    """With what so many tests at once make of single verdicts."""
    after = iter(correct_multiple_comparisons([estimate for _, estimate in found if estimate is not None]))
    comparisons = []
    for comparison, estimate in found:
        if estimate is not None and (kept := next(after)) is not estimate:
            comparison = msgspec.structs.replace(comparison, verdict=kept.verdict, reason=kept.reason)
        comparisons.append(comparison)
    return comparisons


def _make_sample(values: Sequence[Value]) -> Sample:
    """Rounds with what their meter did not know: edges, and what a part-time sensor did not see."""
    return Sample(
        tuple([each.value for each in values]),
        tuple([math.hypot(each.meter, each.unseen) if each.unseen else each.meter for each in values]),
    )


def _not_measured_reason(side: str, record: Record) -> str:
    return f"{side} is {record.status}{f' ({record.reason})' if record.reason else ''}"


def _one_line(what: str, differences: Sequence[str]) -> str:
    return f"{what} ({'; '.join(differences)})"


def _recorded_value(record: Record | None, metric: str) -> float | None:
    found = record.metrics.get(metric) if record is not None else None
    return _finite_or_none(found.value) if found is not None else None


def _finite_or_none(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


@lru_cache(maxsize=64)
def _applied_rule(rule: Rule) -> AppliedRule:
    return AppliedRule(
        threshold=rule.threshold,
        threshold_absolute=rule.threshold_absolute,
        floor=rule.floor,
        tolerance=rule.tolerance,
        alpha=rule.alpha,
    )
