# SPDX-License-Identifier: Apache-2.0
"""The floor of a machine: by how much comparisons of unchanged code have been certain of a change on it.

``llenergy ab --aa`` learns it. Each kind of device has a file in ``.llenergy/floors`` of the project. Its
name is the fingerprint of its facts, so that another machine of the same kind uses it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import describe_devices, device_facts, fingerprint
from pytest_llenergy.compare.comparison import DEFAULT_METRICS
from pytest_llenergy.compare.gate import rule_with_floor
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import MALFORMED, Count, StoredStruct
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.defaults import MAX_FLOOR
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.report import PairedReport, Report

#: Share of the comparisons that the floor keeps from being certain of a change; it is rounded up to a step.
QUANTILE, STEP = 0.95, 0.001


class LearnedFloor(StoredStruct, frozen=True):
    """The floor of a metric on a kind of device.

    Attributes:
        key: The fingerprint of the devices and meters.
        floor: Relative change.
        comparisons: Comparisons of unchanged code; ``estimates`` counts those of single tests.
        date: Day of the last one (UTC).
        devices: The devices, for readers.
    """

    key: str
    metric: str
    floor: Annotated[float, msgspec.Meta(ge=0)]
    comparisons: Count
    estimates: Count
    date: str
    devices: str


def certain_change(comparison: Comparison) -> float | None:
    """Return the relative change that the limits of a comparison are certain of, in either direction.

    This is how far the nearer limit is from no change; 0 if the limits include it. The scatter of rounds
    therefore does not count, only what it does not explain. None without limits.
    """
    if comparison.low is None or comparison.high is None or comparison.low <= 0:
        return None
    return max(comparison.low - 1, 1 / comparison.high - 1, 0.0)


def estimate_floor(changes: Sequence[float]) -> float:
    """Return the smallest change that at least 95 % do not exceed, rounded up; of fewer than 20 the largest.

    As a floor, it would have kept these comparisons from being called a change.
    """
    chosen = sorted(changes)[math.ceil(QUANTILE * len(changes)) - 1]
    # Rounding errors must not raise a floor of exactly a step to the next one.
    return round(math.ceil(chosen / STEP - 1e-9) * STEP, 6)


def estimate_floors(reports: Sequence[PairedReport], date: str) -> list[LearnedFloor]:
    """Estimate the floor of each metric on each kind of device."""
    changes: dict[tuple[str, str, str], list[float]] = {}
    for paired in reports:
        records = {record.id: record for record in paired.base.records}
        for each in paired.compared.comparisons:
            change = certain_change(each)
            if each.id in records and each.rule_applied and change is not None:
                machine = records[each.id], paired.base.environment
                kind = fingerprint(device_facts(*machine)), each.metric, describe_devices(*machine)
                changes.setdefault(kind, []).append(change)
    return [
        LearnedFloor(
            key=key,
            metric=metric,
            floor=estimate_floor(found),
            comparisons=len(reports),
            estimates=len(found),
            date=date,
            devices=devices,
        )
        for (key, metric, devices), found in changes.items()
    ]


def save_floors(root: Path, floors: Sequence[LearnedFloor]) -> None:
    """Write floors to the file of their kind of device. Those of other metrics are kept."""
    for key in {each.key for each in floors}:
        path = floors_directory(root) / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {each.metric: each for each in [*_read(path), *floors] if each.key == key}
        replace_file(path, msgspec.json.format(msgspec.json.encode([*merged.values()])) + b"\n")


def apply_floors(
    criteria: Sequence[Criterion], root: Path, report: Report
) -> tuple[list[Criterion], list[str]]:
    """Return criteria with learned floors that are larger than their own, and a line for each that is used.

    Args:
        criteria: The criteria of a command line.
        root: The project.
        report: The first report of a comparison, whose machine counts; of several kinds of device the largest
            floor.

    Raises:
        PlanError: If a file holds no floors.
    """
    measured = [record for record in report.records if record.rounds]
    keys = {fingerprint(device_facts(record, report.environment)) for record in measured}
    learned = [each for key in sorted(keys) for each in _read(floors_directory(root) / f"{key}.json")]
    applied, lines = [], []
    for criterion in criteria:
        names = DEFAULT_METRICS if criterion.metric is None else (criterion.metric,)
        fitting = [each for each in learned if each.metric in names]
        found = max(fitting, key=lambda each: each.floor, default=None)
        if found is not None and found.floor > criterion.rule.floor:
            criterion = replace(criterion, rule=rule_with_floor(found.floor, criterion.rule))
            lines.append(
                f"floor {found.floor:.1%} (from {found.comparisons} A/A comparisons of {found.date}), in "
                f".llenergy/floors/{found.key}.json; changes up to it do not count (--floor=1% overrides it)"
            )
        applied.append(criterion)
    return applied, list(dict.fromkeys(lines))


def floors_directory(root: Path) -> Path:
    """Return the directory of the learned floors of a project."""
    return root / ".llenergy" / "floors"


def _read(path: Path) -> list[LearnedFloor]:
    try:
        found = msgspec.json.decode(read_limited(path), type=list[LearnedFloor])
    except FileNotFoundError:
        return []
    except (OSError, *MALFORMED) as error:
        raise PlanError(
            f"{path} is not a file of floors ({error}); delete it, and llenergy ab --aa writes it"
        ) from None
    return [each for each in found if each.floor <= MAX_FLOOR]
