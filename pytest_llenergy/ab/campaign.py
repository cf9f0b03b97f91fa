# SPDX-License-Identifier: Apache-2.0
"""Run sessions of both sides alternately, stage by stage, until every test has a verdict."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

import pytest_llenergy
from pytest_llenergy.ab.join import SideSessions, choose_anchor, list_excluded_rounds
from pytest_llenergy.ab.measured_command import describe_startup, energy_per
from pytest_llenergy.ab.session import Earlier, Turn, Watch, run_session, show_failure
from pytest_llenergy.ab.sides import Prepared, check_imports, format_duration
from pytest_llenergy.ab.state import SIDES, State, explain_unfinished, lacks_tests, load_report
from pytest_llenergy.compare.comparability import MeasuredRecord
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import note_unchecked_marks
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.pairing import pair_by_parameters
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.stages import decide_stage
from pytest_llenergy.compare.statistics import Estimate, Sample
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.comparison import ComparedReports
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import SCHEMA_VERSION, PairedReport, Report, Session, SideName, Tool
from pytest_llenergy.record.text import count_tests, shorten


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a campaign."""

    say: Callable[[str], None]  # receives progress lines
    show: Callable[[str], None] | None = None  # receives the output of sessions


class Campaign:
    """All sessions of one comparison; ``name`` tells it from others in progress lines."""

    def __init__(self, plan: Prepared, state: State, callbacks: Callbacks, name: str = "") -> None:
        self._plan = plan
        self._name = name
        self._state = state
        self._callbacks = callbacks
        self._gathered: dict[SideName, SideSessions] = {side: SideSessions() for side in SIDES}
        self._sessions: list[Session] = []
        #: Duration of each session, also of those that were finished before (seconds).
        self._durations_s: list[float] = []
        #: The stage at which each test was finished, by its common name.
        self._done: dict[str, int] = {}
        #: Tests that need more pairs, as far as the verdicts of the current stage are known.
        self._undecided: set[str] = set()
        self._stage = 1

    def run(self) -> PairedReport:
        """Run the sessions that are still missing and compare."""
        schedule = self._plan.schedule
        most = sum(schedule.pairs)
        for stage, count in enumerate(schedule.pairs, 1):
            self._stage = stage
            for done, pair in enumerate(schedule.turns(stage), 1):
                measured = [self._run_turn(turn) for turn in pair]
                self._finish_tests(ends_stage=done == count)
                still, number = len(self._open_tests), pair[1].number // 2
                if any(measured):
                    text = f"{still} of {count_tests(still + len(self._done))} open"
                    if still and number < most:
                        # The first session of all may load models that later ones find.
                        pair_s = 2 * sum(self._durations_s[1:]) / (len(self._durations_s) - 1)
                        text += f"; at most {format_duration((most - number) * pair_s)} left"
                    of = f"{self._name}, " * bool(self._name)
                    self._callbacks.say(f"[{of}pair {number} of at most {most}] {text}")
                if not still:
                    return self._build_result()
        return self._build_result()

    def _finish_tests(self, *, ends_stage: bool) -> None:
        """Finish tests that more sessions cannot decide, and at the end of a stage those with a verdict.

        Those failed, are on one side only, or are not comparable. The last stage finishes all.
        """
        names, self._undecided = self._names, set()
        verdicts: dict[str, set[str]] = {}
        for each in self._compare().comparisons:
            verdicts.setdefault(each.id, set()).add(each.verdict)
        finished = {names[side][name] for side in SIDES for name in self._gathered[side].undecidable}
        finished |= set(names["base"].values()) ^ set(names["head"].values())
        finished |= {name for name, found in verdicts.items() if found == {"not comparable"}}
        if ends_stage and self._stage == len(self._plan.schedule.pairs):
            finished |= self._open_tests
        elif ends_stage:
            finished |= self._open_tests - self._undecided
        self._done = dict.fromkeys(finished, self._stage) | self._done

    def _estimate(
        self, measured: MeasuredRecord, base: Sample, head: Sample, rule: Rule, metric: str
    ) -> Estimate:
        """Decide on a metric at the current stage of its test."""
        record = measured.record
        stage = self._done.get(record.id, self._stage)
        better = direction_of(metric, record)
        step = decide_stage(base, head, stage, self._plan.schedule.stages, rule, better)
        if not step.done:
            self._undecided.add(record.id)
        return step.estimate

    @property
    def _names(self) -> dict[SideName, dict[str, str]]:
        """The name of each test of either side that both have in common, by its node id."""
        base, head = (
            {name: parts[0].record for name, parts in self._gathered[side].parts.items()} for side in SIDES
        )
        if self._plan.by_options:
            before, after = pair_by_parameters(base, head)
            return {"base": before, "head": after}
        return {"base": {name: name for name in base}, "head": {name: name for name in head}}

    @property
    def _open_tests(self) -> set[str]:
        return {common for names in self._names.values() for common in names.values()} - self._done.keys()

    def _run_turn(self, turn: Turn) -> bool:
        """Load or measure a session. Returns whether it was measured."""
        files, side = self._state.files(turn), self._plan.sides[turn.side]
        found = files.end.exists()
        report = load_report(files) if found else self._measure(turn)
        if report is not None:
            self._gathered[turn.side].add(turn.number, report)
            same = {name: getattr(report.run, name) for name in ("started_at", "finished_at", "exit_status")}
            self._sessions.append(Session(side=turn.side, run_id=report.run.id, **same))
        if found:
            self._durations_s.append(float(files.end.read_text()))
        if turn.number <= 2 and self._plan.checks_imports(side):
            try:
                check_imports(side, files.directory.glob("modules-*"))
            except PlanError:
                # The session measured the wrong code.
                shutil.rmtree(files.directory)
                raise
        return not found

    def _measure(self, turn: Turn) -> Report | None:
        plan, say = self._plan, self._callbacks.say
        side = plan.sides[turn.side]
        plan.check_before(side)
        done = [name for name, common in self._names[turn.side].items() if common in self._done]
        files = self._state.begin(turn)
        session = f"session {turn.number} ({turn.side} {side.short})"
        if turn.number <= 2:
            say(f"{session} starts{f' of {self._name}' if self._name else ''}; it may load models")
        show = self._callbacks.show
        began_s = time.monotonic()
        code = run_session(
            side,
            files,
            plan.schedule.rounds,
            Earlier(done=done, devices=self._devices_before(turn.side)),
            Watch(say) if show is None else lambda printed: show(printed.read()),
        )
        self._durations_s.append(time.monotonic() - began_s)
        # The head's tests are then new, or those of the base removed. Without any, nothing is compared.
        may_lack = turn.number == 1 or (turn.number == 2 and self._gathered["base"].reports)
        paths = [side.directory / word.partition("::")[0] for word in side.args if word]
        if may_lack and not plan.by_options and lacks_tests(files, code, paths):
            return None
        how = explain_unfinished(files, code)
        report = load_report(files) if how is None else None
        if report is not None:
            # The session is finished once this file is there.
            replace_file(files.end, str(self._durations_s[-1]).encode())
            return report
        line = show_failure(files.log, say)
        why = f"{how}: {line!r}" if how is not None else "measured no test"
        raise PlanError(f"{session} {why}; the whole log: {files.log}")

    def _devices_before(self, side: SideName) -> dict[str, list[str]]:
        """Return the devices of each test of a side in earlier sessions, those of the baseline first."""
        names, known = self._names, dict[str, list[str]]()
        for each in reversed(SIDES):
            for name, parts in self._gathered[each].parts.items():
                known[names[each][name]] = choose_anchor(parts).record.devices
        own = {name: known[common] for name, common in names[side].items() if common in known}
        return known | own

    def _join_reports(self) -> tuple[Report, Report]:
        reports, names = [], self._names
        for side in SIDES:
            gathered = self._gathered[side]
            report = gathered.join() if gathered.reports else self._report_no_tests(side)
            records = [msgspec.structs.replace(each, id=names[side][each.id]) for each in report.records]
            reports.append(msgspec.structs.replace(report, records=records))
        return reports[0], reports[1]

    def _report_no_tests(self, side: SideName) -> Report:
        """Return the report of a side that has no energy test."""
        other = self._gathered["head" if side == "base" else "base"].reports[0]
        run = msgspec.structs.replace(other.run, id=f"no-{side}-{other.run.id}", exit_status=None)
        source = self._plan.sides[side].source
        return msgspec.structs.replace(other, run=run, source=source, records=[], baseline=None)

    def _compare(self) -> ComparedReports:
        base, head = self._join_reports()
        plan = self._plan
        measured = plan.sides["head"].measured
        compared = compare_reports(
            base,
            head,
            (plan.sides["base"].origin, plan.sides["head"].origin),
            self._plan.criteria,
            across=plan.across,
            estimator=self._estimate,
            sample_custom=measured.sample if measured is not None else None,
        )
        if measured is None or not (base.records and head.records):
            return compared
        notes = measured.list_other_work(base.records[0], head.records[0])
        told = {*measured.better, *map(energy_per, measured.per)}
        comparisons = [
            each if each.metric in told else msgspec.structs.replace(each, notes=[*each.notes, *notes])
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
        return PairedReport(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            pairs=str(self._plan.schedule.stages),
            complete=True,
            sessions=self._sessions,
            base=base,
            head=head,
            compared=compared,
        )

    def _notes(self, base: Report, head: Report) -> list[str]:
        notes, names = list(self._plan.notes), self._names
        if self._plan.by_options:
            unpaired = sorted(set(names["base"].values()) ^ set(names["head"].values()))
            if unpaired:
                notes.append(f"no single test of the other side matches: {shorten(', '.join(unpaired), 300)}")
        for side, report in (("base", base), ("head", head)):
            for record in report.records:
                reasons = list_excluded_rounds(record)
                if reasons:
                    notes.append(f"{side}: {len(reasons)} rounds of {record.id} are excluded: {reasons[0]}")
        marked = [parts[0].record for side in self._gathered.values() for parts in side.parts.values()]
        notes += note_unchecked_marks(marked, self._plan.criteria)
        if self._plan.sides["head"].measured is not None:
            notes += filter(None, [describe_startup(base.records[0], head.records[0])])
        return notes
