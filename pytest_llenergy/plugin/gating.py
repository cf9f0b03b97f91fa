# SPDX-License-Identifier: Apache-2.0
"""Compare each test of a run with its baseline, and tell what the gates did not cover.

Tests are compared in the process that ran them, so that a broken gate fails the test itself. A run that
compares nothing does not import this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import MeasuredRecord
from pytest_llenergy.compare.comparison import (
    compare_records,
    compare_without_baseline,
    incomplete_run_note,
)
from pytest_llenergy.compare.gate import (
    Gate,
    list_void_gates,
    rule_with_floor,
    select_criteria,
    suggest_remedy,
)
from pytest_llenergy.compare.history import StoredEstimator
from pytest_llenergy.compare.pairing import describe_changing_ids
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.plugin.baseline import StoredBaseline, baseline_of, is_skipped
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.defaults import HISTORY
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests, escape_surrogates

NO_BASELINE = "no baseline was given (--energy-compare)"

#: Why a test that this run did not select, or not reach, was not compared.
ABSENT = "not in this run"

#: Most names of tests in one line.
MAX_NAMES = 5


class Gating:
    """Compares tests of one process with the baseline, which is read when first needed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._settings = settings_of(config)

    @cached_property
    def _environment(self) -> Environment:
        return collect_environment()

    @cached_property
    def _estimator(self) -> StoredEstimator:
        return StoredEstimator(self._config.rootpath / HISTORY)

    def compare(
        self,
        record: Record,
        gate: Gate | None,
        hosts: Mapping[str, Environment],
    ) -> list[Comparison]:
        """Compare a test with its baseline in every metric that the options or the gate of its mark names."""
        threshold = gate.threshold if gate is not None else None
        fail_on = self._settings.fail_on
        common = rule_with_floor(self._settings.floor)
        stored = baseline_of(self._config)
        if stored is None:
            criteria = select_criteria(fail_on, threshold, common) if fail_on or threshold is not None else []
            return [_ungated(record, each) for each in criteria]
        record = _as_stored(record)
        before = stored.records.get(record.id)
        measured_before = before is not None and before.rounds
        criteria = select_criteria(fail_on, threshold, common)
        if not record.rounds and threshold is None and not measured_before:
            # Windows of energy_meter are not compared; metrics that the test adds itself, or has lost, are.
            own = {*record.custom, *(before.custom if before is not None else ())}
            criteria = [each for each in criteria if each.metric in own]
        if before is None:
            incomplete = None if stored.report.run.complete else stored.origin
            return [compare_without_baseline(record, each, incomplete) for each in criteria]
        base = MeasuredRecord(before, stored.report.environment)
        head = MeasuredRecord(record, self._environment.with_hosts(hosts))
        return [compare_records(base, head, each, estimator=self._estimator) for each in criteria]


GATING = pytest.StashKey[Gating]()


def gating_of(config: pytest.Config) -> Gating:
    """Return the gating of this process, created on first use."""
    if GATING not in config.stash:
        config.stash[GATING] = Gating(config)
    return config.stash[GATING]


def _as_stored(record: Record) -> Record:
    """Convert a record as writing a report would, so that equal names and parameters compare equal."""
    primitives = escape_surrogates(msgspec.to_builtins(record))
    return msgspec.json.decode(msgspec.json.encode(primitives), type=Record)


def _ungated(record: Record, criterion: Criterion) -> Comparison:
    return msgspec.structs.replace(
        compare_without_baseline(record, criterion), verdict="new", reason=NO_BASELINE
    )


def describe_ungated(
    stored: StoredBaseline | None, records: Sequence[Record], config: pytest.Config, *, with_lost: bool = True
) -> list[str]:
    """Return a line for each reason why gates did not cover, or could not decide on, some tests.

    Without ``with_lost``, tests that were lost are not named: an error does so.
    """
    settings = settings_of(config)
    comparisons = [each for record in records for each in record.comparisons if each.verdict != "no value"]
    waiting = {each.id for each in comparisons if each.gated and each.reason == NO_BASELINE}
    lines = [f"not gated: {count_tests(len(waiting))}, {NO_BASELINE}"] if waiting else []
    if stored is None:
        return lines
    if not stored.report.run.complete:
        lines.append(incomplete_run_note(stored.origin))
    unsure = [each for each in comparisons if each.gated and each.verdict == "inconclusive"]
    if unsure and settings.inconclusive == "warn":
        lines.append(
            f"inconclusive: {len(unsure)} of {len(comparisons)}; "
            f"{suggest_remedy(unsure, 'more rounds (--energy-rounds)')}, "
            "--energy-inconclusive=fail fails such tests"
        )
    windows = sum(not record.rounds and bool(record.windows) for record in records if record.counts)
    if windows:
        lines.append(f"not compared: {count_tests(windows)} with windows of energy_meter only")
    lost = stored.list_lost(records, partial(_explain_absent, config))
    if lost and with_lost:
        lines.append(f"in {stored.origin} but not compared: {_name_lost(lost)}")
    lines += describe_changing_ids(lost, [each.id for each in comparisons if each.verdict == "new"])
    if comparisons and all(each.verdict == "new" for each in comparisons) and not stored.records:
        lines.append(f"no baseline: {count_tests(len({each.id for each in comparisons}), 'new ')}")
    return lines


def list_gate_errors(
    stored: StoredBaseline, records: Sequence[Record], config: pytest.Config, *, on_command_line: bool
) -> list[str]:
    """Return a line for each gate that was requested and not checked, although no test failed by it.

    If the options are ``on_command_line``, a run without measurements is an error; an ini file may apply to
    other runs.
    """
    lines, settings = [], settings_of(config)
    comparisons = [each for record in records for each in record.comparisons]
    gated = [each for each in comparisons if each.gated]
    decided = any(each.rule_applied for each in gated)
    lost = stored.list_lost(records, partial(_explain_absent, config)) if records or on_command_line else {}
    if not settings.fail_on:
        # Those that a mark gated.
        lost = {
            name: why
            for name, why in lost.items()
            if any(each.from_mark for each in stored.records[name].comparisons)
        }
    why = None
    if not decided:
        why = "nothing was compared"
    elif set(lost.values()) != {ABSENT}:
        why = "measure them or deselect them"
    elif settings.inconclusive == "fail":
        why = "--energy-inconclusive=warn accepts this"
    if lost and why is not None:
        lines.append(f"{count_tests(len(lost))} of {stored.origin} not compared: {_name_lost(lost)}; {why}")
    named = {each.metric for each in settings.fail_on}
    void = list_void_gates(each for each in comparisons if each.gated or each.metric in named)
    if not void and not decided and (gated or (on_command_line and settings.fail_on)):
        void = _explain_nothing_gated(stored, records, gated)
    return lines + void


def _explain_nothing_gated(
    stored: StoredBaseline, records: Sequence[Record], gated: Sequence[Comparison]
) -> list[str]:
    if not records:
        return ["nothing was gated: no test was measured"]
    if not stored.records:
        return []
    states = Counter[str](each.verdict for each in gated)
    if not gated:
        states = Counter(record.status for record in records)
    return [f"nothing was gated: {', '.join(f'{count} {state}' for state, count in states.items())}"]


def _explain_absent(config: pytest.Config, record: Record) -> str:
    if is_skipped(config, record.id):
        return "its file was skipped"
    state = state_of(config)
    backend = record.params.get("backend") if record.backend is not None else None
    # One that --energy-backend leaves out is not selected.
    selected = [spec.name for spec in state.selected_backends]
    absent = backend is not None and not state.settings.backend and backend not in selected
    return "its backend is not installed" if absent else ABSENT


def _name_lost(lost: Mapping[str, str]) -> str:
    named = [f"{_function_name(name)} ({why})" for name, why in lost.items()]
    return ", ".join(named[:MAX_NAMES]) + (
        f" and {len(lost) - MAX_NAMES} more" if len(lost) > MAX_NAMES else ""
    )


def _function_name(name: str) -> str:
    path, bracket, params = name.partition("[")
    return f"{path.rpartition('::')[2]}{bracket}{params}"
