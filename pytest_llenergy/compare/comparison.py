# SPDX-License-Identifier: Apache-2.0
"""Compare the tests of two reports: pair their records and decide a verdict on each metric.

The statistical rule applies only to records that are comparable (see ``comparability``). The verdict of any
other comparison states why it was not applied: ``new``, ``removed``, ``invalid`` or ``not comparable``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from pytest_llenergy.compare.case import Case, Criterion, has_metric, is_energy_metric
from pytest_llenergy.compare.comparability import (
    comparison_notes,
    describe_devices,
    device_differences,
    partial_loads,
    work_differences,
    workload_differences,
)
from pytest_llenergy.compare.covariates import Covariates, find_disturbance, round_covariates
from pytest_llenergy.compare.custom import compare_custom
from pytest_llenergy.compare.max_load import MAX_LOAD, decide_by_bounds, sample_searches
from pytest_llenergy.compare.metrics import METRICS, unit_of
from pytest_llenergy.compare.multiple_comparisons import correct_multiple_comparisons
from pytest_llenergy.compare.outputs import check_outputs
from pytest_llenergy.compare.pairing import (
    mark_renamed,
    match_renamed,
    pair_records,
    rename_records,
    select_last_attempts,
)
from pytest_llenergy.compare.rule import BY_METERS, DEFAULT_RULE, HELD_BACK, Rule
from pytest_llenergy.compare.statistics import STORED, Estimate, Sample, compare_samples
from pytest_llenergy.record.base import pause_garbage_collection
from pytest_llenergy.record.comparison import (
    ONLY_IN_BASELINE,
    OTHER_WORKLOAD,
    ComparedReports,
    Comparison,
    ReportSource,
)
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.goodput_metrics import GOODPUT_METRICS
from pytest_llenergy.record.metrics import ROUND_METRICS, applies_to_rounds, is_prefill_only, values_of_rounds
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.round_statistics import RoundValue
from pytest_llenergy.record.scoring import PER_JOULE
from pytest_llenergy.record.text import count_tests

#: Metrics to compare if none is named: the first if every side produces tokens, the second if every side only
#: reads them, otherwise the third.
PER_TOKEN, PER_INPUT_TOKEN = "energy_per_output_token_j", "energy_per_input_token_j"
PER_ITERATION = "energy_j"
DEFAULT_METRICS = (PER_TOKEN, PER_INPUT_TOKEN, PER_ITERATION)

#: Output tokens that differ by more than this, or by the threshold if it is larger, are other work.
TOKEN_TOLERANCE = 0.03

#: How to accept a test that does other work than in the baseline.
ACCEPT = "llenergy compare --across compares them all the same, and a new baseline accepts the change"

#: How to compare searches whose record has only parts of loads.
COMPLETE = "only whole loads can be gated; let max_load search lower rates (between=) or longer (budget=)"

#: Decides the verdict on one metric from the record of the head, both samples, the rule and the metric.
Estimator = Callable[[Record, Sample, Sample, Rule, str], Estimate]


def default_metric(*records: Record | None) -> str:
    """Return joules per output token, or per input token of work that only reads, otherwise joules."""
    measured = [record for record in records if record is not None and record.rounds]
    if measured and all(is_prefill_only(record.rounds) for record in measured):
        return PER_INPUT_TOKEN
    if measured and all(applies_to_rounds(PER_TOKEN, record.rounds) for record in measured):
        return PER_TOKEN
    return PER_ITERATION


def has_measurements(records: Mapping[str, Record]) -> bool:
    """Return whether any record can serve as a baseline."""
    return any(record.counts and (record.rounds or record.custom) for record in records.values())


def describe_side(report: Report, origin: str) -> ReportSource:
    """Describe where a report comes from; ``origin`` is the name of its file for messages."""
    return ReportSource(
        origin=origin,
        run_id=report.run.id,
        started_at=report.run.started_at,
        complete=report.run.complete,
        commit=report.source.commit,
        branch=report.source.branch,
        dirty=report.source.dirty,
    )


#: Statuses of records in a sentence, if not ``is invalid`` and the like.
STATUS_VERBS = {"failed": "failed", "skipped": "was skipped", "crashed": "crashed"}


@dataclass(frozen=True)
class MeasuredRecord:
    """A record and the environment in which it was measured."""

    record: Record
    environment: Environment | None


def estimate_once(_: Record, base: Sample, head: Sample, rule: Rule, metric: str) -> Estimate:
    """Decide on all rounds of two separate sessions at once; the default ``Estimator``."""
    return compare_samples(base, head, rule, METRICS[metric].better, STORED)


def compare_records(
    base: MeasuredRecord,
    head: MeasuredRecord,
    criterion: Criterion,
    *,
    across: bool = False,
    estimator: Estimator = estimate_once,
) -> Comparison:
    """Compare one metric of one test. Measured values never raise.

    Args:
        base: The record of the baseline.
        head: The record to compare with it.
        criterion: Metric and rule.
        across: Also compare different workloads, such as two backends, and note the differences.
        estimator: Decides the verdict.
    """
    return _compare_records(base, head, criterion, across=across, estimator=estimator)[0]


def compare_without_baseline(head: Record, criterion: Criterion, incomplete: str | None = None) -> Comparison:
    """Return the comparison of a test that the baseline lacks.

    Args:
        head: The record of the test.
        criterion: Metric and rule.
        incomplete: Name of the baseline if its run did not finish. The baseline may then lack the test
            because it was stopped early, so the verdict is ``invalid`` instead of ``new``.
    """
    case = Case(criterion.metric or default_metric(head), criterion, None, head, criterion.gated)
    if not head.counts:
        ungated = Case(case.metric, criterion, None, head, gated=case.gated and head.status != "skipped")
        return ungated.without_estimate("invalid", _not_measured_reason("head", head))
    if incomplete is not None:
        return case.without_estimate("invalid", _missing_reason(incomplete))
    return case.without_estimate("new", "not in the baseline")


def compare_reports(
    base: Report,
    head: Report,
    origins: tuple[str, str],
    criteria: Sequence[Criterion],
    *,
    across: bool = False,
    estimator: Estimator = estimate_once,
) -> ComparedReports:
    """Compare every test of two reports by each criterion.

    The correction for multiple comparisons applies to each criterion separately.

    Args:
        base: The report of the baseline.
        head: The report to compare with it.
        origins: Names of both reports for messages.
        criteria: Metrics and rules.
        across: Also compare different workloads, and note the differences.
        estimator: Decides the verdicts.

    Raises:
        ReportError: If an attempt of a test has two records in a report.
    """
    base_incomplete, head_incomplete = (
        None if report.run.complete else origin for report, origin in zip((base, head), origins, strict=True)
    )
    comparisons: list[Comparison] = []
    with pause_garbage_collection():
        base_records = select_last_attempts(base.records, origins[0])
        head_records = select_last_attempts(head.records, origins[1])
        renamed = match_renamed(base_records, head_records)
        base_paired = rename_records(base_records, renamed)
        for criterion in criteria:
            results: list[tuple[Comparison, Estimate | None]] = []
            for before, after in pair_records(base_paired, head_records):
                if before is None and after is not None:
                    results.append((compare_without_baseline(after, criterion, base_incomplete), None))
                elif before is not None and after is None:
                    results.append((_compare_removed(before, criterion, head_incomplete), None))
                elif before is not None and after is not None:
                    measured = (
                        MeasuredRecord(before, base.environment),
                        MeasuredRecord(after, head.environment),
                    )
                    found = _compare_records(*measured, criterion, across=across, estimator=estimator)
                    results.append((mark_renamed(found[0], renamed), found[1]))
            comparisons += _correct_comparisons(results)
    sides = describe_side(base, origins[0]), describe_side(head, origins[1])
    # Most records have the same devices: describe each set once.
    distinct = {(*each.devices, *each.meters): each for each in head_records.values() if each.rounds}
    devices = (describe_devices(record, head.environment) for record in distinct.values())
    return ComparedReports(
        base=sides[0],
        head=sides[1],
        comparisons=comparisons,
        devices=list(dict.fromkeys(devices)),
        notes=[
            *[incomplete_run_note(side.origin) for side in sides if not side.complete],
            *[f"renamed, and compared: {old} -> {new}" for new, old in renamed.items()],
            *_describe_reruns(head, origins[1]),
            *_describe_floor(criteria),
        ],
    )


def _describe_floor(criteria: Sequence[Criterion]) -> list[str]:
    floor = max((each.rule.floor for each in criteria), default=0.0)
    return [f"changes up to {floor * 100:.3g}% do not count"] if floor > DEFAULT_RULE.threshold else []


def _describe_reruns(head: Report, origin: str) -> list[str]:
    count = len({record.id for record in head.records if record.attempt > 1})
    return [f"{origin}: {count_tests(count)} ran again; the last attempts are compared"] if count else []


def incomplete_run_note(origin: str) -> str:
    """Return the note on a report of a run that was stopped or killed."""
    return f"{origin} is from a run that did not finish; its remaining tests are missing"


def _missing_reason(origin: str) -> str:
    return f"missing in {origin}, whose run did not finish"


def _compare_removed(base: Record, criterion: Criterion, incomplete: str | None) -> Comparison:
    # A test without a measurement in the baseline was not checked before either.
    gated = criterion.gated and base.counts
    case = Case(criterion.metric or default_metric(base), criterion, base, None, gated)
    if incomplete is not None:
        return case.without_estimate("invalid", _missing_reason(incomplete))
    return case.without_estimate("removed", ONLY_IN_BASELINE)


def _compare_records(
    base: MeasuredRecord,
    head: MeasuredRecord,
    criterion: Criterion,
    *,
    across: bool,
    estimator: Estimator = estimate_once,
) -> tuple[Comparison, Estimate | None]:
    old, new = base.record, head.record
    metric = criterion.metric or default_metric(old, new)
    is_custom, is_energy = metric not in ROUND_METRICS, is_energy_metric(metric)
    unit = unit_of(metric, old, new)
    case = Case(metric, criterion, old, new, criterion.gated)
    if new.status == old.status == "skipped":
        ungated = Case(metric, criterion, old, new, gated=False)
        return ungated.without_estimate("invalid", _not_measured_reason("head", new)), None
    if new.counts and old.status in STATUS_VERBS and not old.counts:
        ungated = Case(metric, criterion, old, new, gated=False)
        found = ungated.without_estimate("new", _not_measured_reason("base", old))
        return msgspec.structs.replace(found, base_status=old.status), None
    for side, record in (("base", old), ("head", new)):
        if not record.counts:
            return case.without_estimate("invalid", _not_measured_reason(side, record)), None
        if not record.rounds and not is_custom:
            reason = f"{side} has only windows of energy_meter and no rounds to compare"
            return case.without_estimate("invalid", reason), None
        recorded = record.metrics.get(metric)
        if recorded is not None and recorded.unit != unit:
            reason = f"{side} has {metric} in {recorded.unit or 'no unit'}, expected {unit or 'no unit'}"
            return case.without_estimate("invalid", reason), None
    if not criterion.from_mark and not (has_metric(metric, old) or has_metric(metric, new)):
        ungated = Case(metric, criterion, old, new, gated=False)
        missing = f"neither side has {metric}" if is_custom else ROUND_METRICS[metric].absent
        return ungated.without_estimate("no value", missing), None
    if is_energy and old.kind != new.kind:
        reason = f"base is {old.kind or 'without a meter'}, head is {new.kind or 'without a meter'}"
        if {old.kind, new.kind} == {"measured", "attributed"}:
            reason += ": other processes used the CPUs of one of them"
        differences = [f"meter.kind: {old.kind} -> {new.kind}"]
        return case.without_estimate("not comparable", reason, differences), None
    differences = device_differences(old, new, base.environment, head.environment, meters=is_energy)
    if differences:
        reason = f"different devices ({'; '.join(differences)})"
        return case.without_estimate("not comparable", reason, differences), None
    differences = workload_differences(old, new)
    if differences and not across:
        reason = f"different workload ({'; '.join(differences)})"
        return case.without_estimate("not comparable", reason, differences), None
    tolerance = max(criterion.rule.threshold, TOKEN_TOLERANCE)
    # Goodput and the maximum load are what saturation costs; joules are then those of other work.
    saturation = is_energy or metric not in GOODPUT_METRICS
    partial = partial_loads(old, new) if saturation else []
    if partial and criterion.gated and not across:
        return case.without_estimate("not comparable", f"{'; '.join(partial)}: {COMPLETE}", partial), None
    changes = work_differences(old, new, tolerance, saturation=saturation)
    if changes and criterion.gated and not across:
        return case.without_estimate("not comparable", f"{'; '.join(changes)}: {ACCEPT}", changes), None
    differences += partial + changes
    if has_metric(metric, new) and not has_metric(metric, old):
        return case.without_estimate("new", f"the baseline has no {metric}"), None
    if is_custom:
        found = compare_custom(case, differences)
        return (check_outputs(found, case) if metric == PER_JOULE else found), None

    def decide(base: Sample, head: Sample) -> Estimate:
        return estimator(new, base, head, criterion.rule, metric)

    decided = decide_by_bounds(old, new, criterion.rule, decide) if metric == MAX_LOAD else None
    if decided is not None:
        decided = _hold_back(decided, old, new)
        return case.without_estimate(decided.verdict, decided.reason), None
    samples = []
    for side, record in (("base", old), ("head", new)):
        values, why = values_of_rounds(metric, record.rounds)
        if not values:
            return case.without_estimate("invalid", f"{side} has no {metric}: {why}"), None
        of_rounds = _make_sample(values, record.rounds, unit)
        samples.append(sample_searches(record, unit) if metric == MAX_LOAD else of_rounds)
    estimate = decide(samples[0], samples[1])
    if metric == MAX_LOAD:
        # What limits a search is its bracket, and no meter.
        estimate = replace(estimate, reason=estimate.reason.replace(BY_METERS, "the searches can"))
    estimate = _hold_back(estimate, old, new, (samples[0].covariates, samples[1].covariates))
    notes = [*estimate.corrections, *comparison_notes(old, new, base.environment, head.environment)]
    notes += [f"{OTHER_WORKLOAD}{line}" for line in differences]
    return check_outputs(case.with_estimate(samples[0], samples[1], estimate, notes), case), estimate


def _correct_comparisons(results: Sequence[tuple[Comparison, Estimate | None]]) -> list[Comparison]:
    corrected = iter(correct_multiple_comparisons([each for _, each in results if each is not None]))
    comparisons = []
    for comparison, estimate in results:
        kept = next(corrected) if estimate is not None else estimate
        # An improvement with other outputs is not comparable, whatever becomes of its limits.
        if kept is not estimate and kept is not None and comparison.verdict != "not comparable":
            comparison = msgspec.structs.replace(comparison, verdict=kept.verdict, reason=kept.reason)
        comparisons.append(comparison)
    return comparisons


def _make_sample(values: Sequence[tuple[int, RoundValue]], rounds: Sequence[Round], unit: str) -> Sample:
    """Make a sample of the values of a metric, each with the index of its round."""
    return Sample(
        values=tuple([each.value for _, each in values]),
        uncertainties=tuple([each.meter for _, each in values]),
        unit=unit,
        # Energy that a part-time sensor missed, and what the course of power between ticks makes uncertain.
        shared=tuple([math.hypot(each.unsampled, each.shape) for _, each in values]),
        pairs=tuple([index for index, _ in values]),
        covariates=round_covariates([rounds[index] for index, _ in values]),
    )


def _hold_back(
    estimate: Estimate, base: Record, head: Record, covariates: tuple[Covariates, Covariates] = ({}, {})
) -> Estimate:
    """Return no verdict on a change if most rounds of a side were disturbed."""
    if estimate.verdict in ("inconclusive", "invalid"):
        return estimate
    noise = estimate.noise if estimate.interleaved else None
    why = find_disturbance(base, head, estimate.adjusted, covariates, noise=noise)
    if why is None:
        return estimate
    reason = f"{estimate.verdict} {HELD_BACK} {why}; {estimate.reason}"
    return replace(estimate, verdict="inconclusive", reason=reason)


def _not_measured_reason(side: str, record: Record) -> str:
    test = "baseline" if side == "base" else side
    reason = f" ({record.reason})" if record.reason else ""
    return f"the {test} test {STATUS_VERBS.get(record.status, f'is {record.status}')}{reason}"
