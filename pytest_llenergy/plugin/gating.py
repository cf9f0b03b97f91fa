# SPDX-License-Identifier: Apache-2.0
"""Compare each test of a run with its baseline.

Tests are compared in the process that ran them, so that a broken gate fails the test itself. A run that
compares nothing does not import this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import MeasuredRecord, compare_records, compare_without_baseline
from pytest_llenergy.compare.gate import Gate, common_rule, select_criteria
from pytest_llenergy.compare.history.spread import StoredEstimator
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import Work, find_renamed, group_by_work, mark_renamed
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.errors import warn_caller
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.baseline import NO_BASELINE, StoredBaseline, baseline_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.xdist import record_id, worker_input_of
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.defaults import HISTORY
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import BackendInfo, Record
from pytest_llenergy.record.text import escape_surrogates


class Gating:
    """Compares tests of one process with the baseline, which is read when first needed."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        # Tests of the baseline that were not collected, as far as no other was found to be one of them.
        self._gone: dict[Work, list[Record]] | None = None

    @cached_property
    def _environment(self) -> Environment:
        return collect_environment()

    @cached_property
    def _estimator(self) -> StoredEstimator:
        folder = self._config.rootpath / HISTORY
        return StoredEstimator(folder if folder.is_dir() else None, self._environment, _warn_always)

    def compare(
        self,
        record: Record,
        gate: Gate | None,
        collected: Sequence[pytest.Item],
        hosts: Mapping[str, Environment],
    ) -> list[Comparison]:
        """Compare a test with its baseline in every metric that the options or its gate names.

        Args:
            record: The record of the test.
            gate: Its gate from a mark.
            collected: Tests of this run: others of the baseline may have been renamed.
            hosts: The hosts of a cluster on which the test ran, by name.
        """
        threshold = gate.threshold if gate is not None else None
        fail_on = self._settings.fail_on
        common = common_rule(self._settings.floor, self._settings.agreement)
        stored = baseline_of(self._config)
        if stored is None:
            criteria = select_criteria(fail_on, threshold, common) if fail_on or threshold is not None else []
            return [_ungated(record, each) for each in criteria]
        record = _as_stored(record)
        renamed = self._match_renamed(record, stored, collected)
        before = stored.records.get(renamed.get(record.id, record.id))
        if before is not None and renamed:
            before = msgspec.structs.replace(before, id=record.id)
        measured_before = before is not None and before.rounds and self._settings.removed == "fail"
        criteria = select_criteria(fail_on, threshold, common)
        if not record.rounds and threshold is None and not measured_before:
            # Windows of energy_meter are not compared; metrics that the test adds itself, or has lost, are.
            own = {*record.custom, *(before.custom if before is not None else ())}
            criteria = [each for each in criteria if each.metric in own]
        comparisons = []
        for each in criteria:
            if before is None:
                incomplete = None if stored.report.run.complete else stored.origin
                comparisons.append(compare_without_baseline(record, each, incomplete))
            else:
                base = MeasuredRecord(before, stored.report.environment)
                head = MeasuredRecord(record, self._environment.with_hosts(hosts))
                self._estimator.environment = head.environment
                found = compare_records(base, head, each, estimator=self._estimator)
                comparisons.append(mark_renamed(self._explain_missing(found, record), renamed))
        return comparisons

    def _explain_missing(self, comparison: Comparison, record: Record) -> Comparison:
        """Give the reason for a metric that the baseline has, if a hook may add it after the gate."""
        metric = comparison.metric
        missing = comparison.verdict == "invalid" and comparison.base is not None
        if not missing or metric in METRICS or metric in record.metrics:
            return comparison
        if not self._config.hook.pytest_llenergy_record.get_hookimpls():
            return comparison
        reason = f"no {metric} yet: hooks add metrics after the gates; use llenergy compare"
        return msgspec.structs.replace(comparison, reason=reason)

    def _match_renamed(
        self, record: Record, stored: StoredBaseline, collected: Sequence[pytest.Item]
    ) -> dict[str, str]:
        """Return the id that a test has in the baseline by its present id; empty without a match."""
        worker = worker_input_of(self._config)
        # A test that each worker runs has a baseline for each, and a worker knows only its own tests.
        if record.id in stored.records or worker.label:
            return {}
        if self._gone is None:
            ids = {record_id(each.nodeid, label=worker.label, grouped=worker.grouped) for each in collected}
            self._gone = group_by_work(each for name, each in stored.records.items() if name not in ids)
        old = find_renamed(record, self._gone)
        if old is None:
            return {}
        self._gone = {work: records for work, records in self._gone.items() if old not in records}
        return {record.id: old.id}


GATING = pytest.StashKey[Gating]()


def gating_of(config: pytest.Config) -> Gating:
    """Return the gating of this process, created on first use."""
    if GATING not in config.stash:
        config.stash[GATING] = Gating(config, settings_of(config))
    return config.stash[GATING]


def _as_stored(record: Record) -> Record:
    """Convert names and parameters as writing a report would, so that equal ones compare equal."""
    backend = record.backend
    return msgspec.structs.replace(
        record,
        id=escape_surrogates(record.id),
        params=msgspec.json.decode(
            msgspec.json.encode(escape_surrogates(record.params)), type=dict[str, Primitive]
        ),
        backend=msgspec.json.decode(msgspec.json.encode(backend), type=BackendInfo) if backend else None,
    )


def _warn_always(message: str) -> None:
    """Issue a warning that fails no test, even if warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warn_caller(message)


def _ungated(record: Record, criterion: Criterion) -> Comparison:
    return msgspec.structs.replace(
        compare_without_baseline(record, criterion), verdict="new", reason=NO_BASELINE
    )
