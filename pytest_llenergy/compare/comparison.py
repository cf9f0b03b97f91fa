# SPDX-License-Identifier: Apache-2.0
"""Compare the tests of two reports: pair their records and decide a verdict on each metric.

The statistical rule applies only to records that are comparable (see ``comparability``). The verdict of any
other comparison states why it was not applied: ``new``, ``removed``, ``invalid`` or ``not comparable``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TypeVar

import msgspec

from pytest_llenergy.compare.case import MAX_LOAD, Case, Criterion, has_metric
from pytest_llenergy.compare.comparability import (
    comparison_notes,
    describe_devices,
    device_differences,
    partial_loads,
    work_differences,
    workload_differences,
)
from pytest_llenergy.compare.custom import Value, compare_custom, decide_values
from pytest_llenergy.compare.disturbance import find_disturbance, load_of_others
from pytest_llenergy.compare.metrics import METRICS, unit_of
from pytest_llenergy.compare.outputs import check_outputs
from pytest_llenergy.compare.pairing import (
    describe_changing_ids,
    match_renamed,
    select_last_attempts,
)
from pytest_llenergy.compare.rule import DEFAULT_RULE, HELD_BACK, Rule
from pytest_llenergy.compare.statistics import (
    MIN_ROUNDS,
    SESSION_SPREAD,
    STORED,
    Estimate,
    Sample,
    compare_samples,
    correct_multiple_comparisons,
)
from pytest_llenergy.record.base import pause_garbage_collection
from pytest_llenergy.record.comparison import (
    ONLY_IN_BASELINE,
    OTHER_WORKLOAD,
    ComparedReports,
    Comparison,
    ReportSource,
)
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.goodput import GOODPUT_METRICS
from pytest_llenergy.record.metrics import ROUND_METRICS, applies_to_rounds, is_prefill_only, values_of_rounds
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.round_metric import is_energy_unit, is_valid
from pytest_llenergy.record.round_statistics import RoundValue, half_student
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

V = TypeVar("V", Comparison, Estimate)

#: Decides the verdict on one metric from the record of the head, both samples, the rule and the metric.
Estimator = Callable[[Record, Sample, Sample, Rule, str], Estimate]

#: Makes the sample of a custom metric, None if its values are compared without an estimator.
CustomSampler = Callable[[Record, str], Sample | None]


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
    return _compare_records(base, head, criterion, across=across, judge_outputs=True, estimator=estimator)[0]


def compare_without_baseline(head: Record, criterion: Criterion, incomplete: str | None = None) -> Comparison:
    """Return the comparison of a test that the baseline lacks.

    Args:
        head: The record of the test.
        criterion: Metric and rule.
        incomplete: Name of the baseline if its run did not finish. The baseline may then lack the test
            because it was stopped early, so the verdict is ``invalid`` instead of ``new``.
    """
    case = Case(criterion.metric or default_metric(head), criterion, None, head)
    if not head.counts:
        return case.decide("invalid", _not_measured_reason("head", head), gated=head.status != "skipped")
    if incomplete is not None:
        return case.decide("invalid", _missing_reason(incomplete))
    return case.decide("new", "not in the baseline")


def compare_reports(
    base: Report,
    head: Report,
    origins: tuple[str, str],
    criteria: Sequence[Criterion],
    *,
    across: bool = False,
    judge_outputs: bool = True,
    estimator: Estimator = estimate_once,
    sample_custom: CustomSampler | None = None,
) -> ComparedReports:
    """Compare every test of two reports by each criterion.

    The correction for multiple comparisons applies to each criterion separately.

    Args:
        base: The report of the baseline.
        head: The report to compare with it.
        origins: Names of both reports for messages.
        criteria: Metrics and rules.
        across: Also compare different workloads, and note the differences.
        judge_outputs: Whether a saving with other outputs is not comparable, rather than one with a note.
        estimator: Decides the verdicts.
        sample_custom: Makes samples of custom metrics that have a value in each session.

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
        old_ids = {old: new for new, old in renamed.items()}
        base_paired = {
            old_ids.get(name, name): msgspec.structs.replace(record, id=old_ids[name])
            if name in old_ids
            else record
            for name, record in base_records.items()
        }
        for criterion in criteria:
            results: list[tuple[Comparison, Estimate | None]] = []
            alone = [name for name in base_paired if name not in head_records]
            for name in (*head_records, *alone):
                before, after = base_paired.get(name), head_records.get(name)
                if before is None and after is not None:
                    results.append((compare_without_baseline(after, criterion, base_incomplete), None))
                elif before is not None and after is None:
                    results.append((_compare_removed(before, criterion, head_incomplete), None))
                elif before is not None and after is not None:
                    measured = (
                        MeasuredRecord(before, base.environment),
                        MeasuredRecord(after, head.environment),
                    )
                    found, estimate = _compare_records(
                        *measured,
                        criterion,
                        across=across,
                        judge_outputs=judge_outputs,
                        estimator=estimator,
                        sample_custom=sample_custom,
                    )
                    old = renamed.get(after.id)
                    if old is not None:
                        notes = [f"renamed from {old}", *found.notes]
                        found = msgspec.structs.replace(found, renamed_from=old, notes=notes)
                    results.append((found, estimate))
            comparisons += _correct_comparisons(results)
    sides = describe_side(base, origins[0]), describe_side(head, origins[1])
    # Most records have the same devices: describe each set once.
    distinct = {(*each.devices, *each.meters): each for each in head_records.values() if each.rounds}
    devices = (describe_devices(record, head.environment) for record in distinct.values())
    reruns = len({record.id for record in head.records if record.attempt > 1})
    floor = max((each.rule.floor for each in criteria), default=0.0)
    return ComparedReports(
        base=sides[0],
        head=sides[1],
        comparisons=comparisons,
        devices=list(dict.fromkeys(devices)),
        notes=[
            *[incomplete_run_note(side.origin) for side in sides if not side.complete],
            *[f"renamed, and compared: {old} -> {new}" for new, old in renamed.items()],
            *describe_changing_ids(base_paired.keys() - head_records, head_records.keys() - base_paired),
            *(
                [f"{origins[1]}: {count_tests(reruns)} ran again; the last attempts are compared"]
                if reruns
                else []
            ),
            *([f"changes up to {floor * 100:.3g}% do not count"] if floor > DEFAULT_RULE.threshold else []),
        ],
    )


def incomplete_run_note(origin: str) -> str:
    """Return the note on a report of a run that was stopped or killed."""
    return f"{origin} is from a run that did not finish; its remaining tests are missing"


def _missing_reason(origin: str) -> str:
    return f"missing in {origin}, whose run did not finish"


def _compare_removed(base: Record, criterion: Criterion, incomplete: str | None) -> Comparison:
    # A test without a measurement in the baseline was not checked before either.
    case = Case(criterion.metric or default_metric(base), criterion, base, None)
    if incomplete is not None:
        return case.decide("invalid", _missing_reason(incomplete), gated=base.counts)
    return case.decide("removed", ONLY_IN_BASELINE, gated=base.counts)


def _compare_records(
    base: MeasuredRecord,
    head: MeasuredRecord,
    criterion: Criterion,
    *,
    across: bool,
    judge_outputs: bool,
    estimator: Estimator,
    sample_custom: CustomSampler | None = None,
) -> tuple[Comparison, Estimate | None]:
    old, new = base.record, head.record
    case = Case(criterion.metric or default_metric(old, new), criterion, old, new)
    differences: list[str] = []
    found = _refuse(case, base, head, differences, across=across)
    if found is not None:
        return found, None
    metric = case.metric
    samples = []
    if metric not in ROUND_METRICS:
        sampled = [sample_custom(record, metric) for record in (old, new)] if sample_custom else [None]
        samples = [each for each in sampled if each is not None]
        if len(samples) < 2:
            found = compare_custom(case, differences)
            return (
                check_outputs(found, old, new, judge=judge_outputs) if metric == PER_JOULE else found
            ), None
    for side, record in (("base", old), ("head", new)) if not samples else ():
        values, why = values_of_rounds(metric, record.rounds)
        if not values:
            return case.decide("invalid", f"{side} has no {metric}: {why}"), None
        of_rounds = _make_sample(values, record.rounds, unit_of(metric, old, new))
        samples.append(_sample_searches(record) if metric == MAX_LOAD else of_rounds)
    estimate = estimator(new, samples[0], samples[1], criterion.rule, metric)
    if metric == MAX_LOAD and min(estimate.n_base, estimate.n_head) < MIN_ROUNDS:
        # Each session is one result, whose uncertainty the search knows.
        spread = estimate.design.session_spread or SESSION_SPREAD
        results = [_result_of(each, record, spread) for each, record in zip(samples, (old, new), strict=True)]
        found = decide_values(case, results[0], results[1], differences)
        return _hold_back(found, old, new, load_matters=True), None
    alike = estimate.design.interleaved or bool(estimate.corrections)
    estimate = _hold_back(estimate, old, new, load_matters=not alike)
    notes = [*estimate.corrections, *comparison_notes(old, new, base.environment, head.environment)]
    compared = case.decide(
        estimate.verdict,
        estimate.reason,
        ratio=estimate.ratio,
        low=estimate.low,
        high=estimate.high,
        # The values of the tables; a report without metrics has those of its rounds.
        base=median(samples[0].values),
        head=median(samples[1].values),
        n_base=estimate.n_base,
        n_head=estimate.n_head,
        noise=estimate.noise,
        detectable=estimate.detectable,
        p=estimate.p,
        session_spread=estimate.design.session_spread or None,
        notes=[*notes, *(f"{OTHER_WORKLOAD}{line}" for line in differences)],
    )
    return check_outputs(compared, old, new, judge=judge_outputs), estimate


def _refuse(
    case: Case, base: MeasuredRecord, head: MeasuredRecord, differences: list[str], *, across: bool
) -> Comparison | None:
    """Return the comparison of records to which the rule does not apply, or None.

    Appends the differences of the workloads that are compared all the same.
    """
    metric, criterion, old, new = case.metric, case.criterion, base.record, head.record
    unit = unit_of(metric, old, new)
    is_custom, is_energy = metric not in ROUND_METRICS, is_energy_unit(unit)
    if new.status == old.status == "skipped":
        return case.decide("invalid", _not_measured_reason("head", new), gated=False)
    if new.counts and old.status in STATUS_VERBS and not old.counts:
        reason = _not_measured_reason("base", old)
        return case.decide("new", reason, gated=False, base_status=old.status)
    for side, record in (("base", old), ("head", new)):
        if not record.counts:
            return case.decide("invalid", _not_measured_reason(side, record))
        if not record.rounds and not is_custom:
            return case.decide("invalid", f"{side} has only windows of energy_meter and no rounds to compare")
        recorded = record.metrics.get(metric)
        if recorded is not None and recorded.unit != unit:
            reason = f"{side} has {metric} in {recorded.unit or 'no unit'}, expected {unit or 'no unit'}"
            return case.decide("invalid", reason)
    if not criterion.from_mark and not (has_metric(metric, old) or has_metric(metric, new)):
        missing = f"neither side has {metric}" if is_custom else ROUND_METRICS[metric].absent
        return case.decide("no value", missing, gated=False)
    if is_energy and old.kind != new.kind:
        reason = f"base is {old.kind or 'without a meter'}, head is {new.kind or 'without a meter'}"
        if {old.kind, new.kind} == {"measured", "attributed"}:
            reason += ": others used the CPUs of one of them"
        return case.decide("not comparable", reason, [f"meter.kind: {old.kind} -> {new.kind}"])
    found = device_differences(old, new, base.environment, head.environment, meters=is_energy)
    if found:
        return case.decide("not comparable", f"different devices ({'; '.join(found)})", found)
    differences += workload_differences(old, new)
    if differences and not across:
        reason = f"different workload ({'; '.join(differences)})"
        return case.decide("not comparable", reason, differences)
    # Goodput and the maximum load are what saturation costs; energy is then that of other work.
    saturation = is_energy or metric not in GOODPUT_METRICS
    tolerance = max(criterion.rule.threshold, TOKEN_TOLERANCE)
    partial = partial_loads(old, new) if saturation else []
    changes = work_differences(old, new, tolerance, saturation=saturation)
    for found, remedy in ((partial, COMPLETE), (changes, ACCEPT)):
        if found and criterion.gated and not across:
            return case.decide("not comparable", f"{'; '.join(found)}: {remedy}", found)
    differences += partial + changes
    if has_metric(metric, new) and not has_metric(metric, old):
        return case.decide("new", f"the baseline has no {metric}")
    return None


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
        load=load_of_others([rounds[index] for index, _ in values]),
    )


def _sample_searches(record: Record) -> Sample:
    """Return the maximum load of each session, which all its rounds repeat."""
    searches = dict.fromkeys((each.session or 1, each.max_load) for each in record.rounds if is_valid(each))
    found = [
        (session, each.requests_per_s, each)
        for session, each in searches
        if each is not None and each.requests_per_s is not None
    ]
    return Sample(
        values=tuple([value for _, value, _ in found]),
        # The scatter of sessions shows all but the bracket, of which both sides may have the same.
        shared=tuple(
            [
                max((each.below_requests_per_s or value) - value, 0.0) / math.sqrt(3)
                for _, value, each in found
            ]
        ),
        # Sessions are numbered over both sides.
        pairs=tuple([(session - 1) // 2 for session, _, _ in found]),
    )


def _result_of(sample: Sample, record: Record, spread: float) -> Value:
    """Return the mean of few searches; what each does not know may be the same in all of them."""
    own = [each.max_load.u_requests_per_s or 0.0 for each in record.rounds if each.max_load is not None]
    n, mean = len(sample.values), fmean(sample.values)
    # Sessions that scatter more than usual count as they are.
    seen = stdev(sample.values) * half_student(n - 1) if n > 1 else 0.0
    u = math.hypot(fmean(own), max(spread * mean, seen) / math.sqrt(n))
    return Value(mean, u, results=n)


def _hold_back(found: V, base: Record, head: Record, *, load_matters: bool) -> V:
    """Return no verdict on a change if most rounds of a side were disturbed."""
    if found.verdict in ("inconclusive", "invalid"):
        return found
    why = find_disturbance(base, head, load_matters=load_matters)
    if why is None:
        return found
    reason = f"{found.verdict} {HELD_BACK} {why}; {found.reason}"
    return msgspec.structs.replace(found, verdict="inconclusive", reason=reason)


def _not_measured_reason(side: str, record: Record) -> str:
    test = "baseline" if side == "base" else side
    reason = f" ({record.reason})" if record.reason else ""
    return f"the {test} test {STATUS_VERBS.get(record.status, f'is {record.status}')}{reason}"
