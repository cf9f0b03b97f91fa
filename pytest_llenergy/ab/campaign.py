# SPDX-License-Identifier: Apache-2.0
"""Run sessions of both sides alternately, stage by stage, until every test has a verdict."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

import pytest_llenergy
from pytest_llenergy.ab.join import (
    PairedNames,
    SessionRecord,
    SideSessions,
    list_excluded_rounds,
    list_workload_changes,
    pair_by_id,
    pair_by_parameters,
    unpaired_note,
)
from pytest_llenergy.ab.measured_command import WORK, describe_startup, energy_per
from pytest_llenergy.ab.schedule import Turn
from pytest_llenergy.ab.session import Earlier, Watch, find_error_line, read_tail, run_session
from pytest_llenergy.ab.sides import Prepared
from pytest_llenergy.ab.state import SIDES, State, explain_unfinished
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.disturbance import load_of_others
from pytest_llenergy.compare.gate import list_over_budget, note_unchecked_marks
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.stages import Stages, decide_stage
from pytest_llenergy.compare.statistics import Estimate, Sample
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.comparison import OTHER_WORKLOAD, ComparedReports, Comparison
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.metrics import values_of_rounds
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import SCHEMA_VERSION, PairedReport, Report, SideName, Tool

#: Most names of tests in one line.
MAX_NAMES = 5

#: Values that a command tells are of other work if they differ by more, relative to the base.
SAME_WORK = 0.03


class StageEstimator:
    """Estimator that decides stage by stage; ``open`` collects the tests that need more pairs."""

    def __init__(self, stages: Stages, test_stage: Callable[[str], int]) -> None:
        self._stages = stages
        self._test_stage = test_stage
        self.open: set[str] = set()

    def __call__(self, record: Record, base: Sample, head: Sample, rule: Rule, metric: str) -> Estimate:
        """Decide on a metric at the current stage of its test."""
        better = direction_of(metric, record)
        step = decide_stage(base, head, self._test_stage(record.id), self._stages, rule, better)
        if not step.done:
            self.open.add(record.id)
        return step.estimate


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a campaign.

    Attributes:
        say: Receives progress lines.
        show: Receives the output of sessions, in place of progress lines on them.
        choose: Called with the first report; returns the criteria for its machine. Raises ``PlanError`` to
            stop.
    """

    say: Callable[[str], None]
    show: Callable[[str], None] | None = None
    choose: Callable[[Report], Sequence[Criterion]] | None = None


class Campaign:
    """All sessions of one comparison; ``name`` tells it from others in progress lines."""

    def __init__(self, plan: Prepared, state: State, callbacks: Callbacks, name: str = "") -> None:
        self._plan = plan
        self._name = name
        self._criteria = plan.criteria
        self._state = state
        self._callbacks = callbacks
        self._gathered: dict[SideName, SideSessions] = {side: SideSessions(side) for side in SIDES}
        self._failed: dict[SideName, Counter[str]] = {side: Counter() for side in SIDES}
        self._order: list[SideSessions] = []
        #: Duration of each session, also of those that were finished before (seconds).
        self.durations_s: list[float] = []
        #: The stage at which each test was finished, by its common name.
        self._done: dict[str, int] = {}
        self._stage = 1

    def run(self) -> PairedReport:
        """Run the sessions that are still missing and compare.

        Raises:
            PlanError: If a session fails.
        """
        schedule = self._plan.schedule
        for stage in range(1, len(schedule.pairs) + 1):
            self._stage = stage
            last = sum(schedule.pairs[:stage])
            for pair in schedule.turns(stage):
                if self._order and not self._open_tests:
                    break
                measured = [self._run_turn(turn) for turn in pair]
                self._finish_undecidable()
                if pair[0].pair == last:
                    self._decide()
                if any(measured):
                    still = self._open_tests
                    counts = still, len(still | self._done.keys()), self._name
                    self._callbacks.say(schedule.describe_pair(pair[0], stage, self.durations_s, *counts))
            if not self._open_tests:
                break
        return self._build_result()

    def _decide(self) -> None:
        """Finish the tests that have a verdict after this stage; after the last, all."""
        estimator = self._estimator()
        self._compare(estimator)
        more = estimator.open if self._stage < len(self._plan.schedule.pairs) else set()
        self._done.update({name: self._stage for name in self._open_tests if name not in more})

    def _estimator(self) -> StageEstimator:
        return StageEstimator(self._plan.schedule.stages, lambda name: self._done.get(name, self._stage))

    @property
    def _names(self) -> PairedNames:
        found = [
            {name: parts[0].record for name, parts in self._gathered[side].parts.items()} for side in SIDES
        ]
        return pair_by_parameters(*found) if self._plan.by_options else pair_by_id(*found)

    @property
    def _open_tests(self) -> set[str]:
        names = self._names
        return ({*names.base.values()} | {*names.head.values()}) - self._done.keys()

    def _run_turn(self, turn: Turn) -> bool:
        """Load or measure a session. Returns whether it was measured."""
        found = self._state.load_finished(turn)
        reports, duration_s = found or self._measure(turn)
        gathered = self._gathered[turn.side]
        gathered.add(turn.number, reports)
        self._failed[turn.side].update(self._state.list_failed_tests(turn))
        self._order += [gathered] * len(reports)
        self.durations_s.append(duration_s)
        if turn.number <= 2:
            try:
                self._plan.check_after(self._plan.sides[turn.side], self._state.list_import_directories(turn))
            except PlanError:
                # The session measured the wrong code.
                self._state.discard(turn)
                raise
        if reports and len(self._order) == len(reports) and self._callbacks.choose is not None:
            self._criteria = self._callbacks.choose(reports[0])
        return found is None

    def _measure(self, turn: Turn) -> tuple[list[Report], float]:
        plan, state, say = self._plan, self._state, self._callbacks.say
        side = plan.sides[turn.side]
        plan.check_before(side)
        names = getattr(self._names, turn.side)
        done = [name for name, common in names.items() if common in self._done]
        # Tests that a stopped attempt measured are not measured again.
        done += [each.id for report in state.load_reports(turn) for each in report.records if each.counts]
        files = state.next_attempt(turn)
        session = f"session {turn.number} ({turn.side} {side.short})"
        if turn.number <= 2:
            where = f" of {self._name}" if self._name else "; the first of a side may load models"
            say(f"{session} starts{where}")
        show, watch = self._callbacks.show, Watch(say, session)
        began_s = time.monotonic()
        code = run_session(
            side,
            files,
            plan.schedule.rounds,
            Earlier(done, self._devices_before(turn.side)),
            watch if show is None else lambda printed: show(printed.read()),
        )
        duration_s = time.monotonic() - began_s
        # The head's tests are then new, or those of the base removed. Without any, nothing is compared.
        may_lack = turn.number == 1 or (turn.number == 2 and self._gathered["base"].reports)
        paths = [side.directory / word.partition("::")[0] for word in side.args if word]
        if may_lack and not plan.by_options and state.lacks_tests(turn, code, paths):
            return [], duration_s
        how = (
            explain_unfinished(files, code)
            if side.measured is None or code <= 0
            else f"ended with exit code {code}"
        )
        reports = state.load_reports(turn) if how is None else []
        if reports:
            # The session is finished once this file is there.
            replace_file(files.end, str(duration_s).encode())
            return reports, duration_s
        for line in read_tail(files.log):
            say(f"  | {line}")
        why = f"{how}: {find_error_line(files.log)!r}" if how is not None else "measured no test"
        raise PlanError(f"{session} {why}; the whole log: {files.log}")

    def _finish_undecidable(self) -> None:
        """Finish tests that more sessions cannot decide: failed, on one side only, or not comparable."""
        names = self._names
        undecidable = {names.base[name] for name in self._gathered["base"].undecidable}
        undecidable |= {names.head[name] for name in self._gathered["head"].undecidable}
        undecidable |= set(names.base.values()) ^ set(names.head.values())
        verdicts: dict[str, set[str]] = {}
        for each in self._compare().comparisons:
            verdicts.setdefault(each.id, set()).add(each.verdict)
        undecidable |= {name for name, found in verdicts.items() if found == {"not comparable"}}
        self._done.update({name: self._stage for name in undecidable if name not in self._done})

    def _devices_before(self, side: SideName) -> dict[str, list[str]]:
        """Return the devices of each test of a side in earlier sessions, those of the baseline first."""
        names, known = self._names, dict[str, list[str]]()
        for each in reversed(SIDES):
            for name, parts in self._gathered[each].parts.items():
                known[getattr(names, each)[name]] = _first_usable(parts).record.devices
        return known | {
            name: known[common] for name, common in getattr(names, side).items() if common in known
        }

    def _choose_anchors(self) -> dict[SideName, dict[str, SessionRecord]]:
        """Choose the session of each test whose devices and meters all others must match.

        This is the first of its side, with the devices of the baseline if both sides use as many.
        """
        anchors = {
            side: {name: _first_usable(parts) for name, parts in self._gathered[side].parts.items()}
            for side in SIDES
        }
        names = self._names
        devices = {names.base[name]: part.record.devices for name, part in anchors["base"].items()}
        for name, part in anchors["head"].items():
            found = devices.get(names.head[name], part.record.devices)
            if found != ["cpu"] and found != part.record.devices and len(found) == len(part.record.devices):
                record = msgspec.structs.replace(part.record, devices=found)
                anchors["head"][name] = SessionRecord(1, record, part.environment)
        return anchors

    def _join_reports(self) -> tuple[Report, Report]:
        reports, anchors = [], self._choose_anchors()
        for side in SIDES:
            report = self._gathered[side].report(anchors[side]) or self._report_no_tests(side)
            common = getattr(self._names, side)
            records = [msgspec.structs.replace(each, id=common[each.id]) for each in report.records]
            reports.append(msgspec.structs.replace(report, records=records))
        return reports[0], reports[1]

    def _report_no_tests(self, side: SideName) -> Report:
        """Return the report of a side that has no energy test."""
        other = self._gathered["head" if side == "base" else "base"].reports[0]
        name = "no-baseline" if side == "base" else "no-head"
        run = msgspec.structs.replace(other.run, id=f"{name}-{other.run.id}", exit_status=None)
        source = self._plan.sides[side].source
        return msgspec.structs.replace(other, run=run, source=source, records=[], baseline=None)

    def _compare(self, estimator: StageEstimator | None = None) -> ComparedReports:
        base, head = self._join_reports()
        plan, estimator = self._plan, estimator or self._estimator()
        origins = plan.sides["base"].origin, plan.sides["head"].origin
        compared = compare_reports(
            base, head, origins, self._criteria, across=plan.across, estimator=estimator
        )
        measured = plan.sides["head"].measured
        if measured is None or not base.records or not head.records:
            return compared
        records, rules = (
            (base.records[0], head.records[0]),
            {each.metric: each.rule for each in self._criteria},
        )
        pers = {energy_per(name): name for name in measured.per}
        comparisons = [
            _judge_value(each, records, rules[each.metric], estimator, pers.get(each.metric))
            if each.metric in records[1].custom and each.rule_applied
            else msgspec.structs.replace(each, notes=[*each.notes, *_other_work(records, measured.better)])
            for each in compared.comparisons
        ]
        return msgspec.structs.replace(compared, comparisons=comparisons)

    def _build_result(self) -> PairedReport:
        base, head = self._join_reports()
        compared = self._compare()
        sides = [compared.base, compared.head]
        if self._plan.by_options:
            # The commit is the same; only the options differ.
            sides = [msgspec.structs.replace(side, commit=None, branch=None) for side in sides]
        compared = msgspec.structs.replace(
            compared, base=sides[0], head=sides[1], notes=[*compared.notes, *self._notes(base, head)]
        )
        places = {side: iter(self._gathered[side].sessions) for side in SIDES}
        return PairedReport(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            pairs=str(self._plan.schedule.stages),
            complete=True,
            sessions=[next(places[gathered.side]) for gathered in self._order],
            base=base,
            head=head,
            compared=compared,
        )

    def _notes(self, base: Report, head: Report) -> list[str]:
        notes, names = list(self._plan.notes), self._names
        if not self._plan.by_options:
            notes += [
                f"renamed, and compared: {old} -> {new}" for old, new in names.base.items() if old != new
            ]
        if names.unpaired:
            notes.append(unpaired_note(names.unpaired))
        for side, report in zip(SIDES, (base, head), strict=True):
            for name, reasons in list_excluded_rounds(report.records).items():
                notes.append(f"{side}: {len(reasons)} rounds of {name} are excluded: {reasons[0]}")
            for name, parts in self._gathered[side].parts.items():
                changed = list_workload_changes(parts)
                if changed:
                    notes.append(
                        f"{side}: {name} changed its workload between sessions: {'; '.join(changed)}"
                    )
            sessions = len({each.number for parts in self._gathered[side].parts.values() for each in parts})
            failed = [f"{name} ({n} of {max(n, sessions)})" for name, n in self._failed[side].items()]
            if failed:
                notes.append(f"{side}: failed in sessions: {_list_names(failed)}")
        marked = [parts[0].record for side in self._gathered.values() for parts in side.parts.values()]
        notes += note_unchecked_marks(marked, self._criteria)
        for record in list_over_budget(base, head):
            notes.append(f"head: {record.id} is over its budget only on head ({record.reason})")
        if self._plan.sides["head"].measured is not None:
            found = {side: report.records[0] for side, report in zip(SIDES, (base, head), strict=True)}
            startup = describe_startup(found)
            notes += [startup] if startup is not None else []
        return notes


def _judge_value(
    comparison: Comparison,
    records: tuple[Record, Record],
    rule: Rule,
    estimator: StageEstimator,
    per: str | None,
) -> Comparison:
    """Judge a value that a command tells, or the energy per value, by the rule for pairs of sessions."""
    samples = [_sample(record, comparison.metric, per) for record in records]
    if samples[0] is None or samples[1] is None:
        return comparison
    found = estimator(records[1], samples[0], samples[1], rule, comparison.metric)
    if found.ratio is None:
        return comparison
    numbers = {
        name: value if value is None or math.isfinite(value) else None
        for name in ("ratio", "low", "high", "noise", "detectable", "p")
        for value in (getattr(found, name),)
    }
    return msgspec.structs.replace(
        comparison,
        verdict=found.verdict,
        reason=found.reason,
        base=median(samples[0].values),
        head=median(samples[1].values),
        n_base=found.n_base,
        n_head=found.n_head,
        kind=records[1].kind if per is not None else None,
        notes=[*found.corrections, *comparison.notes],
        **numbers,
    )


def _sample(record: Record, metric: str, per: str | None) -> Sample | None:
    """Return the value of each session; ``None`` if one is not positive, so that it has no logarithm."""
    if per is None:
        told = record.custom[metric].values
        return Sample(tuple(told), pairs=tuple(range(len(told)))) if min(told, default=0.0) > 0 else None
    divisors = record.custom[per].values
    energies, _ = values_of_rounds("energy_j", record.rounds)
    if len(divisors) != len(record.rounds):
        return None
    found = [(index, energy.scale(1 / divisors[index])) for index, energy in energies]
    return Sample(
        values=tuple(each.value for _, each in found),
        uncertainties=tuple(each.meter for _, each in found),
        shared=tuple(math.hypot(each.unsampled, each.shape) for _, each in found),
        pairs=tuple(index for index, _ in found),
        load=load_of_others([record.rounds[index] for index, _ in found]),
    )


def _other_work(records: tuple[Record, Record], judged: Iterable[str]) -> list[str]:
    """Return a note for each value by which the sides did other work: their energy and time differ anyway."""
    notes = []
    for name in records[0].custom.keys() & records[1].custom.keys() - set(judged) - {WORK}:
        base, head = (record.value_of(name) for record in records)
        told = records[0].metrics[name].unit == ""
        if told and base is not None and head is not None and abs(head - base) > SAME_WORK * abs(base):
            notes.append(f"{OTHER_WORKLOAD}{name}: {base:g} -> {head:g}")
    return sorted(notes)


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{rest}"


def _first_usable(parts: Iterable[SessionRecord]) -> SessionRecord:
    found = list(parts)
    return next((part for part in found if part.usable), found[0])
