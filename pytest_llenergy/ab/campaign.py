# SPDX-License-Identifier: Apache-2.0
"""Run sessions of both sides alternately, stage by stage, until every test has a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

import pytest_llenergy
from pytest_llenergy.ab.checkouts import Repository, find_error_line, read_tail
from pytest_llenergy.ab.command import Command
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
from pytest_llenergy.ab.progress import (
    FIRST_SIGN_S,
    LATER_SIGN_S,
    RemainingTime,
    SessionWatch,
    describe_pair,
)
from pytest_llenergy.ab.schedule import Schedule, Side, Turn
from pytest_llenergy.ab.session import run_session, session_arguments
from pytest_llenergy.ab.state import SessionEnd, State
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import list_over_budget, note_unchecked_marks
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.stages import Stages, decide_stage
from pytest_llenergy.compare.statistics import Estimate, Sample
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.comparison import ComparedReports
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import SCHEMA_VERSION, PairedReport, Report, SideName, Source, Tool

#: Most names of tests in one line.
MAX_NAMES = 5

#: Iterations per round of the two sides that differ by more are noted. By less they differ by themselves, as
#: each session chooses them for its own rounds.
ITERATIONS_FACTOR = 4


class FailureCounts:
    """Counts the sessions of one side in which each test failed."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._sessions = 0

    def add(self, names: Iterable[str]) -> None:
        """Add the failed tests of a session."""
        self._counts.update(names)
        self._sessions += 1

    def note(self, side: str) -> str | None:
        """Return a note on the failures, or ``None`` if there are none."""
        if not self._counts:
            return None
        counts = [f"{name} ({count} of {self._sessions})" for name, count in self._counts.items()]
        return f"{side}: failed in sessions: {_list_names(counts)}"


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
class CampaignPlan:
    """What to compare, and how.

    Attributes:
        sides: Baseline and head.
        command: The pytest command.
        schedule: The order of sessions.
        criteria: Metrics and rules.
        across: Whether the workloads differ on purpose.
        renamed: Whether the sides have their own options, which may change the ids of tests.
        notes: Notes for the report.
    """

    sides: Mapping[SideName, Side]
    command: Command
    schedule: Schedule
    criteria: Sequence[Criterion]
    across: bool = False
    renamed: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class CampaignCallbacks:
    """Callbacks of a campaign.

    Attributes:
        say: Receives progress lines.
        show: Receives the output of sessions.
        before: Called before each session. Raises ``PlanError`` to stop.
        check: Called after the first session of a side with the lists of its imports. Raises ``PlanError`` to
            stop.
        choose: Called with the first report; returns the criteria for its machine. Raises ``PlanError`` to
            stop.
    """

    say: Callable[[str], None]
    show: Callable[[str], None] | None = None
    before: Callable[[Side], None] = lambda _: None
    check: Callable[[Side, Sequence[Path]], None] = lambda *_: None
    choose: Callable[[Report], Sequence[Criterion]] | None = None


class Campaign:
    """All sessions of one comparison; ``name`` tells it from others in progress lines."""

    def __init__(
        self, plan: CampaignPlan, state: State, callbacks: CampaignCallbacks, name: str = ""
    ) -> None:
        self._plan = plan
        self._name = name
        self._criteria = plan.criteria
        self._state = state
        self._callbacks = callbacks
        self._gathered: dict[SideName, SideSessions] = {
            "base": SideSessions("base"),
            "head": SideSessions("head"),
        }
        self._failed: dict[SideName, FailureCounts] = {"base": FailureCounts(), "head": FailureCounts()}
        self._skipped: dict[SideName, set[str]] = {"base": set(), "head": set()}
        self._order: list[SideSessions] = []
        self._boots: dict[str, None] = {}
        #: Numbers of the sessions that were finished before.
        self._loaded: set[int] = set()
        self._remaining = RemainingTime()
        #: Duration of all sessions, also of those that were finished before (seconds).
        self.duration_s = 0.0
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
            for number, pair in enumerate(schedule.turns(stage), last - schedule.pairs[stage - 1] + 1):
                if self._order and not self._open_tests:
                    break
                durations_s = {turn.side: self._run_turn(turn) for turn in pair}
                self._finish_undecidable()
                if number == last:
                    self._decide()
                if not {turn.number for turn in pair} <= self._loaded:
                    self._say_pair(number, durations_s)
            if not self._open_tests:
                break
        return self._build_result()

    def _decide(self) -> None:
        """Finish the tests that have a verdict after this stage; after the last, all."""
        schedule = self._plan.schedule
        estimator = StageEstimator(schedule.stages, self._test_stage)
        self._compare(estimator)
        more = estimator.open if self._stage < len(schedule.pairs) else set()
        self._done.update({name: self._stage for name in self._open_tests if name not in more})

    def _say_pair(self, number: int, durations_s: Mapping[SideName, float]) -> None:
        open_tests = self._open_tests
        line = describe_pair(
            number,
            self._stage,
            self._plan.schedule,
            (durations_s["base"], durations_s["head"]),
            open_tests,
            len(open_tests | self._done.keys()),
            self._remaining,
            self._name,
        )
        self._callbacks.say(line)

    def _test_stage(self, name: str) -> int:
        return self._done.get(name, self._stage)

    @property
    def _names(self) -> PairedNames:
        found = [
            {name: parts[0].record for name, parts in self._gathered[side].parts.items()}
            for side in ("base", "head")
        ]
        return pair_by_parameters(*found) if self._plan.renamed else pair_by_id(*found)

    @property
    def _open_tests(self) -> set[str]:
        names = self._names
        return ({*names.base.values()} | {*names.head.values()}) - self._done.keys()

    def _run_turn(self, turn: Turn) -> float:
        """Load or measure a session. Returns its duration (seconds)."""
        found = self._state.load_finished(turn)
        if found is not None:
            self._loaded.add(turn.number)
        reports, end = found or self._measure(turn)
        gathered = self._gathered[turn.side]
        gathered.add(turn.number, reports)
        self._failed[turn.side].add(self._state.list_failed_tests(turn))
        self._skipped[turn.side] |= self._state.list_skipped_modules(turn)
        self._order += [gathered] * len(reports)
        self._boots[end.boot] = None
        self.duration_s += end.duration_s
        names = getattr(self._names, turn.side)
        records = {names[record.id]: record for report in reports for record in report.records}
        self._remaining.add(end.duration_s, records)
        if turn.number <= 2:
            try:
                self._callbacks.check(self._plan.sides[turn.side], self._state.list_import_directories(turn))
            except PlanError:
                # The session measured the wrong code.
                self._state.discard(turn)
                raise
        if reports and len(self._order) == len(reports) and self._callbacks.choose is not None:
            self._criteria = self._callbacks.choose(reports[0])
        return end.duration_s

    def _measure(self, turn: Turn) -> tuple[list[Report], SessionEnd]:
        plan, state = self._plan, self._state
        side = plan.sides[turn.side]
        self._callbacks.before(side)
        names = getattr(self._names, turn.side)
        done = [name for name, common in names.items() if common in self._done]
        # Tests that a stopped attempt measured are not measured again.
        done += [each.id for report in state.load_reports(turn) for each in report.records if each.counts]
        files = state.next_attempt(turn)
        gpus = [] if plan.command.gpus else self._gathered["base"].devices
        words = session_arguments(side, plan.command, files, plan.schedule.rounds, gpus)
        session = f"session {turn.number} ({turn.side} {side.short})"
        if turn.number <= 2:
            where = f" of {self._name}" if self._name else "; the first of a side may load models"
            self._callbacks.say(f"{session} starts{where}")
        first_s = FIRST_SIGN_S if turn.number <= 2 else LATER_SIGN_S
        started, began_s = datetime.now(timezone.utc), time.monotonic()
        code = run_session(
            side,
            words,
            files,
            done,
            self._devices_before(turn.side),
            self._callbacks.show,
            lambda printed: SessionWatch(printed, self._callbacks.say, session, first_s),
        )
        end = state.record_end(files, code, started, time.monotonic() - began_s)
        # The head's tests are then new, or those of the base removed. Without any, nothing is compared.
        may_lack = turn.number == 1 or (turn.number == 2 and self._gathered["base"].reports)
        if may_lack and not plan.renamed and state.lacks_tests(turn, code, side.directory):
            return [], end
        how = state.explain_unfinished(turn, code)
        if how is not None:
            self._show_tail(files.log)
            raise PlanError(f"{session} {how}: {find_error_line(files.log)!r}; the whole log: {files.log}")
        reports = state.load_reports(turn)
        if not reports:
            self._show_tail(files.log)
            raise PlanError(f"{session} measured no test; the whole log: {files.log}")
        return reports, end

    def _show_tail(self, log: Path) -> None:
        for line in read_tail(log):
            self._callbacks.say(f"  | {line}")

    def _finish_undecidable(self) -> None:
        """Finish tests that more sessions cannot decide: failed, on one side only, or not comparable."""
        names = self._names
        undecidable = {names.base[name] for name in self._gathered["base"].undecidable}
        undecidable |= {names.head[name] for name in self._gathered["head"].undecidable}
        undecidable |= set(names.base.values()) ^ set(names.head.values())
        compared = self._compare(None)
        states: dict[str, set[str]] = {}
        for each in compared.comparisons:
            states.setdefault(each.id, set()).add(each.verdict)
        undecidable |= {name for name, found in states.items() if found == {"not comparable"}}
        self._done.update({name: self._stage for name in undecidable if name not in self._done})

    def _devices_before(self, side: SideName) -> dict[str, list[str]]:
        """Return the devices of each test of a side in earlier sessions, those of the baseline first."""
        names, known = self._names, dict[str, list[str]]()
        for each in ("head", "base"):
            for name, parts in self._gathered[each].parts.items():
                known[getattr(names, each)[name]] = _first_usable(parts).record.devices
        return known | {
            name: known[common] for name, common in getattr(names, side).items() if common in known
        }

    def _choose_anchors(self) -> tuple[dict[str, SessionRecord], dict[str, SessionRecord]]:
        """Choose the session of each test whose devices and meters all others must match.

        This is the baseline's first session, for both sides if they use the same number of devices.
        """
        names = self._names
        base = {name: _first_usable(parts) for name, parts in self._gathered["base"].parts.items()}
        head = {name: _first_usable(parts) for name, parts in self._gathered["head"].parts.items()}
        firsts = {names.base[name]: part for name, part in base.items()}
        for name, part in head.items():
            other = firsts.get(names.head[name])
            alike = other is not None and len(other.record.devices) == len(part.record.devices)
            if alike and other is not None and other.record.devices != ["cpu"]:
                head[name] = _with_devices(part, other)
        return base, head

    def _join_reports(self) -> tuple[Report, Report]:
        reports = []
        names = self._names
        for side, anchors, common in zip(
            ("base", "head"), self._choose_anchors(), (names.base, names.head), strict=True
        ):
            gathered = self._gathered[_side_name(side)]
            report = gathered.report(anchors) or self._report_no_tests(_side_name(side))
            records = [msgspec.structs.replace(each, id=common[each.id]) for each in report.records]
            reports.append(msgspec.structs.replace(report, records=records))
        return reports[0], reports[1]

    def _report_no_tests(self, side: SideName) -> Report:
        """Return the report of a side that has no energy test."""
        other = self._gathered["head" if side == "base" else "base"].reports[0]
        name = "no-baseline" if side == "base" else "no-head"
        run = msgspec.structs.replace(other.run, id=f"{name}-{other.run.id}", exit_status=None)
        repository = Repository(self._plan.sides[side].root)
        # The head may be the working tree.
        dirty = side == "head" and repository.has_changes()
        source = Source(commit=repository.resolve_commit("HEAD"), dirty=dirty)
        return msgspec.structs.replace(
            other,
            run=run,
            source=source,
            records=[],
            baseline=None,
        )

    def _compare(self, estimator: StageEstimator | None) -> ComparedReports:
        base, head = self._join_reports()
        plan = self._plan
        origins = plan.sides["base"].origin, plan.sides["head"].origin
        estimator = estimator or StageEstimator(plan.schedule.stages, self._test_stage)
        return compare_reports(base, head, origins, self._criteria, across=plan.across, estimator=estimator)

    def _build_result(self) -> PairedReport:
        base, head = self._join_reports()
        compared = self._compare(None)
        sides = [compared.base, compared.head]
        if self._plan.renamed:
            # The commit is the same; only the options differ.
            sides = [msgspec.structs.replace(side, commit=None, branch=None) for side in sides]
        compared = msgspec.structs.replace(
            compared, base=sides[0], head=sides[1], notes=[*compared.notes, *self._notes(base, head)]
        )
        places = {
            "base": iter(self._gathered["base"].sessions),
            "head": iter(self._gathered["head"].sessions),
        }
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
        notes = list(self._plan.notes)
        if len(self._boots) > 1:
            notes.append(f"rounds of {len(self._boots)} boots: the machine was restarted in between")
        renamed = (
            [] if self._plan.renamed else [pair for pair in self._names.base.items() if pair[0] != pair[1]]
        )
        notes += [f"renamed, and compared: {old} -> {new}" for old, new in renamed]
        if self._names.unpaired:
            notes.append(unpaired_note(self._names.unpaired))
        for side, report in (("base", base), ("head", head)):
            for name, reasons in list_excluded_rounds(report.records).items():
                notes.append(f"{side}: {len(reasons)} rounds of {name} are excluded: {reasons[0]}")
            for name, parts in self._gathered[_side_name(side)].parts.items():
                changed = list_workload_changes(parts)
                if changed:
                    notes.append(
                        f"{side}: {name} changed its workload between sessions: {'; '.join(changed)}"
                    )
            line = self._failed[_side_name(side)].note(side)
            notes += [line] if line is not None else []
        if skipped := sorted(self._skipped["base"] - self._skipped["head"]):
            notes.append(f"base: only there {', '.join(skipped)} is skipped, so its tests are not compared")
        notes += [] if self._plan.across else self._note_procedures()
        marked = [parts[0].record for side in self._gathered.values() for parts in side.parts.values()]
        notes += note_unchecked_marks(marked, self._criteria)
        for record in list_over_budget(base, head):
            notes.append(f"head: {record.id} is over its budget only on head ({record.reason})")
        tools = [_tool_version(base), _tool_version(head)]
        if tools[0] != tools[1]:
            notes.append(f"measured by pytest-llenergy {tools[0]} on base and {tools[1]} on head")
        return notes

    def _note_procedures(self) -> list[str]:
        names = self._names
        heads = {names.head[name]: parts for name, parts in self._gathered["head"].parts.items()}
        notes: dict[str, list[str]] = {}
        for name, parts in self._gathered["base"].parts.items():
            common = names.base[name]
            found = _procedure_differences(parts, heads[common]) if common in heads else []
            if found:
                notes.setdefault("; ".join(found), []).append(common)
        return [
            f"measured with other settings: {what} ({_list_names(tests)})" for what, tests in notes.items()
        ]


def _list_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{rest}"


def _procedure_differences(base: Sequence[SessionRecord], head: Sequence[SessionRecord]) -> list[str]:
    """Return how the measurements of a test differ by its settings; empty if they do not."""
    pair = [_first_usable(parts).record.procedure for parts in (base, head)]
    if pair[0] is None or pair[1] is None:
        return []
    warmups = [
        f"{each.warmup_iterations} iterations" if each.settled is None else "until it settles"
        for each in pair
        if each is not None
    ]
    found = []
    if warmups[0] != warmups[1]:
        found.append(f"warm-up {warmups[0]} on base, {warmups[1]} on head")
    if pair[0].target != pair[1].target:
        found.append(f"target {pair[0].target:.3g} on base, {pair[1].target:.3g} on head")
    counts = pair[0].iterations, pair[1].iterations
    if max(counts) > ITERATIONS_FACTOR * min(counts):
        found.append(f"iterations per round {counts[0]} on base, {counts[1]} on head")
    return found


def _first_usable(parts: Iterable[SessionRecord]) -> SessionRecord:
    found = list(parts)
    return next((part for part in found if part.usable), found[0])


def _with_devices(part: SessionRecord, other: SessionRecord) -> SessionRecord:
    """Return a session of one side as if it had run on the boards of ``other``."""
    record = msgspec.structs.replace(part.record, devices=other.record.devices)
    return SessionRecord(other.number, record, part.environment)


def _side_name(name: str) -> SideName:
    return "base" if name == "base" else "head"


def _tool_version(report: Report) -> str:
    return report.tool.version
