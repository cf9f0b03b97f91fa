# SPDX-License-Identifier: Apache-2.0
"""What is exported: the tests of a report or, of a paired file, those of both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.compare.identity import device_facts, key_of
from pytest_llenergy.compare.pairing import last_attempts
from pytest_llenergy.model.data import Primitive
from pytest_llenergy.model.record import MeterInfo, Metric, Record
from pytest_llenergy.model.report import Report


@dataclass(frozen=True)
class Side:
    """One report. ``name`` is ``base`` or ``head`` in a paired file, and empty elsewhere."""

    name: str
    report: Report

    def records(self) -> list[Record]:
        """The last attempt of each test. Raises ``ReportError`` for one that is there twice."""
        return list(last_attempts(self.report.records, self.name or "the report").values())

    def measured(self) -> list[Record]:
        """Those whose figures count."""
        return [record for record in self.records() if record.counts]

    def device_key(self, record: Record) -> str:
        """Equal for tests that ran on the same kind of devices and were measured in the same way."""
        return key_of(device_facts(record, self.report.environment))


def energy_figures(metrics: Mapping[str, Metric], meters: Sequence[MeterInfo]) -> dict[str, Primitive]:
    """The figures of one test for ``extra_info`` of pytest-benchmark, whose own fields are for seconds.

    Those of an iteration of the work, with the standard uncertainties of ``energy_j`` for comparing runs and,
    accuracy of the source included, in itself; or the reason why there is none.
    """
    told: dict[str, Primitive] = {
        name: metric.value
        for name, metric in metrics.items()
        if metric.value is not None and ("J" in metric.unit or metric.unit == "W")
    }
    energy = metrics["energy_j"]
    if energy.value is not None:
        told |= {"energy_u_j": energy.uncertainty, "energy_u_absolute_j": energy.uncertainty_absolute}
        told["energy_windows"] = energy.n
    if energy.reason is not None:
        told["energy_reason"] = energy.reason
    if meters:
        estimated = any(meter.kind == "estimated" for meter in meters)
        told["energy_kind"] = "estimated" if estimated else "measured"
        told["energy_meters"] = ", ".join(dict.fromkeys(meter.name for meter in meters))
    return told


def figures(record: Record) -> Iterator[tuple[str, Metric, float]]:
    """The metrics that have a value."""
    for name, metric in record.metrics.items():
        if metric.value is not None:
            yield name, metric, metric.value
