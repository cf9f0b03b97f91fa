# SPDX-License-Identifier: Apache-2.0
"""Compare each test of a run with its baseline.

Tests are compared in the process that ran them, so that a broken gate fails the test itself. A run that
compares nothing does not import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import MeasuredRecord
from pytest_llenergy.compare.comparison import compare_records, compare_without_baseline
from pytest_llenergy.compare.gate import Gate, rule_with_floor, select_criteria
from pytest_llenergy.compare.history import StoredEstimator
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.baseline import NO_BASELINE, baseline_of
from pytest_llenergy.plugin.settings import settings_of
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
        """Compare a test with its baseline in every metric that the options or its gate names.

        Args:
            record: The record of the test.
            gate: Its gate from a mark.
            hosts: The hosts of a cluster on which the test ran, by name.
        """
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
        comparisons = []
        for each in criteria:
            if before is None:
                incomplete = None if stored.report.run.complete else stored.origin
                comparisons.append(compare_without_baseline(record, each, incomplete))
            else:
                base = MeasuredRecord(before, stored.report.environment)
                head = MeasuredRecord(record, self._environment.with_hosts(hosts))
                found = compare_records(base, head, each, estimator=self._estimator)
                comparisons.append(self._explain_missing(found, record))
        return comparisons

    def _explain_missing(self, found: Comparison, record: Record) -> Comparison:
        """Give the reason for a metric that the baseline has, if a hook may add it after the gate."""
        missing = found.verdict == "invalid" and found.metric not in {*METRICS, *record.metrics}
        if not missing or not self._config.hook.pytest_llenergy_record.get_hookimpls():
            return found
        reason = f"no {found.metric} yet: hooks add metrics after the gates; use llenergy compare"
        return msgspec.structs.replace(found, reason=reason)


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


def _ungated(record: Record, criterion: Criterion) -> Comparison:
    return msgspec.structs.replace(
        compare_without_baseline(record, criterion), verdict="new", reason=NO_BASELINE
    )
