# SPDX-License-Identifier: Apache-2.0
"""Compare the tests of two reports: pair their records and decide a verdict on each metric.

The statistical rule applies only to records that are comparable (see ``comparability``). The verdict of any
other comparison states why it was not applied: ``new``, ``removed``, ``invalid`` or ``not comparable``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot

import msgspec

from pytest_llenergy.compare.case import Case, Criterion
from pytest_llenergy.compare.comparability import (
    MeasuredRecord,
    describe_devices,
    device_differences,
    load_differences,
    note_other_gpus,
    work_differences,
    workload_differences,
)
from pytest_llenergy.compare.custom import MAX_LOAD, compare_custom
from pytest_llenergy.compare.disturbance import find_disturbance, load_of_others
from pytest_llenergy.compare.metrics import METRICS, unit_of
from pytest_llenergy.compare.outputs import check_outputs
from pytest_llenergy.compare.pairing import describe_changing_ids, select_last_attempts
from pytest_llenergy.compare.rule import DEFAULT_RULE, HELD_BACK, Rule
from pytest_llenergy.compare.statistics import (
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
    Verdict,
)
from pytest_llenergy.record.custom_metrics import PER_JOULE
from pytest_llenergy.record.goodput import GOODPUT_METRICS
from pytest_llenergy.record.metrics import ROUND_METRICS, applies_to_rounds, is_prefill_only, values_of_rounds
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.round_metric import is_energy_unit
from pytest_llenergy.record.round_statistics import RoundValue

#: Metrics to compare if none is named: the first if every side produces tokens, the second if every side only
#: reads them, otherwise the third.
PER_TOKEN, PER_INPUT_TOKEN = "energy_per_output_token_j", "energy_per_input_token_j"
PER_ITERATION = "energy_j"
DEFAULT_METRICS = (PER_TOKEN, PER_INPUT_TOKEN, PER_ITERATION)

#: Output tokens that differ by more than this, or by the threshold if it is larger, are other work.
TOKEN_TOLERANCE = 0.03

#: How to accept a test that does other work than in the baseline.
ACCEPT = "llenergy compare --across compares them all the same, and a new baseline accepts the change"

#: Statuses of records in a sentence, if not ``is invalid`` and the like.
STATUS_VERBS = {"failed": "failed", "skipped": "was skipped", "crashed": "crashed"}

#: Decides the verdict on one metric from the head, both samples, the rule and the metric.
Estimator = Callable[[MeasuredRecord, Sample, Sample, Rule, str], Estimate]

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
    run, code = report.run, msgspec.structs.asdict(report.source)
    return ReportSource(
        origin=origin, run_id=run.id, started_at=run.started_at, complete=run.complete, **code
    )


def incomplete_run_note(origin: str) -> str:
    """Return the note on a report of a run that was stopped or killed."""
    return f"{origin} is from a run that did not finish; its remaining tests are missing"


def estimate_once(_: MeasuredRecord, base: Sample, head: Sample, rule: Rule, metric: str) -> Estimate:
    """Decide on all rounds of two separate sessions at once; the default ``Estimator``."""
    return compare_samples(base, head, rule, METRICS[metric].better, STORED)


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
    """Compare every test of two reports by each criterion; ``origins`` names the reports in messages.

    The correction for multiple comparisons applies to each criterion separately. ``across`` compares
    different workloads, too, and notes the differences. With ``judge_outputs`` a saving with other outputs is
    not comparable, otherwise it has a note.
    """
    incomplete = [
        None if each.run.complete else origin for each, origin in zip((base, head), origins, strict=True)
    ]
    compare = _Comparing(across, judge_outputs, estimator, sample_custom)
    comparisons: list[Comparison] = []
    with pause_garbage_collection():
        before = select_last_attempts(base.records, origins[0])
        after = select_last_attempts(head.records, origins[1])
        removed = [name for name in before if name not in after]
        for criterion in criteria:
            results: list[tuple[Comparison, Estimate | None]] = []
            for name, record in after.items():
                if name not in before:
                    results.append((compare_without_baseline(record, criterion, incomplete[0]), None))
                    continue
                sides = (
                    MeasuredRecord(before[name], base.environment),
                    MeasuredRecord(record, head.environment),
                )
                results.append(compare.records(*sides, criterion))
            results += [(_compare_removed(before[name], criterion, incomplete[1]), None) for name in removed]
            comparisons += _correct_comparisons(results)
    # Most records have the same devices: describe each set once.
    distinct = {(*each.devices, *each.meters): each for each in after.values() if each.rounds}
    devices = (describe_devices(record, head.environment) for record in distinct.values())
    notes = [incomplete_run_note(origin) for origin in incomplete if origin is not None]
    notes += describe_changing_ids(removed, after.keys() - before)
    floor = max((each.rule.floor for each in criteria), default=0.0)
    if floor > DEFAULT_RULE.threshold:
        notes.append(f"changes up to {floor * 100:.3g}% do not count")
    return ComparedReports(
        base=describe_side(base, origins[0]),
        head=describe_side(head, origins[1]),
        comparisons=comparisons,
        devices=list(dict.fromkeys(devices)),
        notes=notes,
    )


def compare_records(
    base: MeasuredRecord, head: MeasuredRecord, criterion: Criterion, estimator: Estimator = estimate_once
) -> Comparison:
    """Compare one metric of one test. Measured values never raise."""
    return _Comparing(estimator=estimator).records(base, head, criterion)[0]


def compare_without_baseline(head: Record, criterion: Criterion, incomplete: str | None = None) -> Comparison:
    """Return the comparison of a test that the baseline lacks.

    It is ``incomplete``, and named so, if its run did not finish: it may lack the test for that reason.
    """
    case = Case(criterion.metric or default_metric(head), criterion, None, head)
    if not head.counts:
        return case.decide("invalid", _not_measured_reason("head", head), gated=head.status != "skipped")
    if incomplete is not None:
        return case.decide("invalid", f"missing in {incomplete}, whose run did not finish")
    return case.decide("new", "not in the baseline")


def _compare_removed(base: Record, criterion: Criterion, incomplete: str | None) -> Comparison:
    # A test without a measurement in the baseline was not checked before either.
    case = Case(criterion.metric or default_metric(base), criterion, base, None)
    if incomplete is not None:
        return case.decide("invalid", f"missing in {incomplete}, whose run did not finish", gated=base.counts)
    return case.decide("removed", ONLY_IN_BASELINE, gated=base.counts)


@dataclass(frozen=True)
class _Comparing:
    """How records are compared: the arguments of ``compare_reports``."""

    across: bool = False
    judge_outputs: bool = True
    estimator: Estimator = estimate_once
    sample_custom: CustomSampler | None = None

    def records(
        self, base: MeasuredRecord, head: MeasuredRecord, criterion: Criterion
    ) -> tuple[Comparison, Estimate | None]:
        """Compare one metric of one test. The estimate is that of the rule, if it was applied."""
        old, new = base.record, head.record
        case = Case(criterion.metric or default_metric(old, new), criterion, old, new)
        found = _refuse_records(case, old, new) or self._refuse_measurements(case, base, head)
        if found is not None:
            return found, None
        differences = workload_differences(old, new)
        if differences and not self.across:
            reason = f"different workload ({'; '.join(differences)})"
            return case.decide("not comparable", reason, differences), None
        changes = _list_other_work(case, old, new)
        if changes and criterion.gated and not self.across:
            return case.decide("not comparable", f"{'; '.join(changes)}: {ACCEPT}", changes), None
        differences += changes
        notes = [*note_other_gpus(old, new), *(f"{OTHER_WORKLOAD}{line}" for line in differences)]
        metric = case.metric
        if _has_metric(metric, new) and not _has_metric(metric, old):
            return case.decide("new", f"the baseline has no {metric}"), None
        found, estimate = self._judge(case, base, head, notes)
        if found.metric in ROUND_METRICS or metric == PER_JOULE:
            found = check_outputs(found, old, new, judge=self.judge_outputs)
        return found, estimate

    def _judge(
        self, case: Case, base: MeasuredRecord, head: MeasuredRecord, notes: Sequence[str]
    ) -> tuple[Comparison, Estimate | None]:
        """Apply the rule to records that may be compared."""
        metric, samples = case.metric, list[Sample | None]()
        for side, each in (("base", base.record), ("head", head.record)):
            if metric in ROUND_METRICS:
                values, why = values_of_rounds(metric, each.rounds)
                if not values:
                    return case.decide("invalid", f"{side} has no {metric}: {why}"), None
                samples.append(make_sample(values, each, ROUND_METRICS[metric].unit))
            else:
                samples.append(None if self.sample_custom is None else self.sample_custom(each, metric))
        before, after = samples
        if before is None or after is None or metric == MAX_LOAD:
            found = compare_custom(case, notes)
            return (_hold_back(found, case, load_matters=True) if metric == MAX_LOAD else found), None
        estimate = self.estimator(head, before, after, case.criterion.rule, metric)
        found = case.decide(
            estimate.verdict,
            estimate.reason,
            ratio=estimate.ratio,
            low=estimate.low,
            high=estimate.high,
            n_base=estimate.n_base,
            n_head=estimate.n_head,
            noise=estimate.noise,
            detectable=estimate.detectable,
            p=estimate.p,
            session_spread=estimate.design.session_spread or None,
            notes=[*estimate.corrections, *notes],
        )
        alike = estimate.design.interleaved or bool(estimate.corrections)
        held = _hold_back(found, case, load_matters=not alike)
        if held is not found:
            estimate = estimate.changed_to("inconclusive", held.reason)
        return held, estimate

    def _refuse_measurements(
        self, case: Case, base: MeasuredRecord, head: MeasuredRecord
    ) -> Comparison | None:
        """Return the comparison of sides that were not measured alike, or None."""
        old, new = base.record, head.record
        is_energy = is_energy_unit(unit_of(case.metric, old, new))
        if is_energy and old.kind != new.kind:
            reason = f"base is {old.kind or 'without a meter'}, head is {new.kind or 'without a meter'}"
            if {old.kind, new.kind} == {"measured", "attributed"}:
                reason += ": others used the CPUs of one of them"
            return case.decide("not comparable", reason, [f"meter.kind: {old.kind} -> {new.kind}"])
        found = device_differences(old, new, base.environment, head.environment, meters=is_energy)
        if found:
            return case.decide("not comparable", f"different devices ({'; '.join(found)})", found)
        return None


def _refuse_records(case: Case, old: Record, new: Record) -> Comparison | None:
    """Return the comparison of records of which one has no value to compare, or None."""
    metric, unit = case.metric, unit_of(case.metric, old, new)
    is_custom = metric not in ROUND_METRICS
    if old.status in STATUS_VERBS and not old.counts:
        side, record = ("base", old) if new.counts else ("head", new)
        verdict: Verdict = "new" if new.counts else "invalid"
        known = {"base_status": old.status} if new.counts else {}
        return case.decide(verdict, _not_measured_reason(side, record), gated=False, **known)
    for side, record in (("base", old), ("head", new)):
        if not record.counts:
            return case.decide("invalid", _not_measured_reason(side, record))
        if not record.rounds and not is_custom:
            return case.decide("invalid", f"{side} has only windows of energy_meter and no rounds to compare")
        recorded = record.metrics.get(metric)
        if recorded is not None and recorded.unit != unit:
            reason = f"{side} has {metric} in {recorded.unit or 'no unit'}, expected {unit or 'no unit'}"
            return case.decide("invalid", reason)
    if not case.criterion.from_mark and not (_has_metric(metric, old) or _has_metric(metric, new)):
        missing = f"neither side has {metric}" if is_custom else ROUND_METRICS[metric].needs
        return case.decide("no value", missing, gated=False)
    return None


def _list_other_work(case: Case, old: Record, new: Record) -> list[str]:
    """Return why equal workloads may be other work."""
    # Goodput and the maximum load are what saturation costs; energy is then that of other work.
    judges_load = case.metric in GOODPUT_METRICS and not is_energy_unit(ROUND_METRICS[case.metric].unit)
    tolerance = max(case.criterion.rule.threshold, TOKEN_TOLERANCE)
    return [*([] if judges_load else load_differences(old, new)), *work_differences(old, new, tolerance)]


def _has_metric(metric: str, record: Record) -> bool:
    """Return whether a record has a metric, built in or custom, even if some sessions lack its value."""
    if metric not in ROUND_METRICS:
        return record.value_of(metric) is not None or metric in record.custom
    return applies_to_rounds(metric, record.rounds)


def make_sample(values: Sequence[tuple[int, RoundValue]], record: Record, unit: str = "") -> Sample:
    """Make a sample of values, each with the index of its round."""
    return Sample(
        values=[each.value for _, each in values],
        uncertainties=[each.meter for _, each in values],
        unit=unit,
        # Energy that a part-time sensor missed, and what the course of power between ticks makes uncertain.
        shared=[hypot(each.unsampled, each.shape) for _, each in values],
        pairs=[index for index, _ in values],
        load=load_of_others([record.rounds[index] for index, _ in values]),
    )


def _hold_back(found: Comparison, case: Case, *, load_matters: bool) -> Comparison:
    """Return no verdict on a change if most rounds of a side were disturbed."""
    if found.verdict in ("inconclusive", "invalid") or case.base is None or case.head is None:
        return found
    why = find_disturbance(case.base, case.head, load_matters=load_matters)
    if why is None:
        return found
    reason = f"{found.verdict} {HELD_BACK} {why}; {found.reason}"
    return msgspec.structs.replace(found, verdict="inconclusive", reason=reason)


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


def _not_measured_reason(side: str, record: Record) -> str:
    test = "baseline" if side == "base" else side
    reason = f" ({record.reason})" if record.reason else ""
    return f"the {test} test {STATUS_VERBS.get(record.status, f'is {record.status}')}{reason}"
