# SPDX-License-Identifier: Apache-2.0
"""The floor of a machine: by how much comparisons of unchanged code have been certain of a change on it.

``llenergy ab --aa`` learns it. Each kind of device has a file in ``.llenergy/floors`` of the project. Its
name is the fingerprint of its facts, so that another machine of the same kind uses it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.comparison import PER_ITERATION, PER_TOKEN, Criterion
from pytest_llenergy.compare.gate import parse_criteria, parse_fail_on
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.base import MALFORMED, Count, StoredStruct
from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.defaults import MAX_FLOOR
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report
from pytest_llenergy.report.store import replace_file

#: Share of the comparisons that the floor keeps from being certain of a change.
QUANTILE = 0.95

#: Floors are rounded up to a multiple of this.
STEP = 0.001

#: Fewer comparisons are no basis for a floor.
MIN_COMPARISONS = 5


class LearnedFloor(StoredStruct, frozen=True):
    """The floor of a metric on a kind of device.

    Attributes:
        floor: Relative change; a file is read only if it is at most ``MAX_FLOOR``.
        comparisons: Comparisons of unchanged code; ``estimates`` counts those of single tests.
        date: Day of the last one (UTC).
        devices: The devices, for readers.
    """

    floor: Annotated[float, msgspec.Meta(ge=0, le=MAX_FLOOR)]
    comparisons: Count
    estimates: Count
    date: str
    devices: str

    def __str__(self) -> str:
        count = f"{self.comparisons} A/A comparison{'' if self.comparisons == 1 else 's'}"
        return f"floor {self.floor:.1%} (from {count} of {self.date})"


def certain_change(comparison: Comparison) -> float | None:
    """Return the relative change that the limits of a comparison are certain of, in either direction.

    This is how far the nearer limit is from no change; 0 if the limits include it. The scatter of rounds
    therefore does not count, only what it does not explain. None without limits.
    """
    if comparison.low is None or comparison.high is None or comparison.low <= 0:
        return None
    return max(comparison.low - 1, 1 / comparison.high - 1, 0.0)


def estimate_floor(changes: Sequence[float]) -> float:
    """Return the change that the limits of 95 in 100 comparisons of unchanged code are not certain of.

    It is the smallest of the changes that at least 95 % do not exceed, rounded up to 0.1 %: with fewer than
    20 the largest. As a floor, it would have kept these comparisons from being called a change.
    """
    chosen = sorted(changes)[math.ceil(QUANTILE * len(changes)) - 1]
    # Rounding errors must not raise a floor of exactly a step to the next one.
    return round(math.ceil(chosen / STEP - 1e-9) * STEP, 6)


def device_key(record: Record, environment: Environment | None) -> str:
    """Return the key of the devices and meters of a test."""
    return fingerprint(device_facts(record, environment))


def save_floors(root: Path, key: str, floors: Mapping[str, LearnedFloor]) -> Path:
    """Write the floors of a kind of device, by metric. Those of other metrics are kept. Returns the file."""
    path = _path(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**_read(path), **floors}
    replace_file(path, msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
    return path


def load_floors(root: Path, report: Report) -> dict[str, LearnedFloor]:
    """Return the floors for the machine of a report by metric: the largest of the devices of its tests."""
    keys = {device_key(record, report.environment) for record in report.records if record.rounds}
    found: dict[str, LearnedFloor] = {}
    for key in sorted(keys):
        for metric, each in _read(_path(root, key)).items():
            if metric not in found or each.floor > found[metric].floor:
                found[metric] = each
    return found


def apply_floors(
    fail_on: Sequence[str], metrics: Sequence[str], learned: Mapping[str, LearnedFloor]
) -> tuple[list[Criterion], list[str]]:
    """Return the criteria of a command line with learned floors, and a line for each floor that is used.

    A floor is used if it is larger than the default.

    Args:
        fail_on: Values of ``--fail-on``.
        metrics: Values of ``--metric``.
        learned: Floors by metric.

    Raises:
        PlanError: If a threshold is below the floor.
    """
    criteria, lines = [], []
    for criterion in parse_criteria(fail_on, metrics):
        names = (PER_TOKEN, PER_ITERATION) if criterion.metric is None else (criterion.metric,)
        floor = max(
            (learned[name] for name in names if name in learned), key=lambda each: each.floor, default=None
        )
        if floor is None or floor.floor <= criterion.rule.floor:
            criteria.append(criterion)
            continue
        texts = [text for text in fail_on if parse_fail_on(text).metric == criterion.metric]
        named = [criterion.metric] if criterion.metric is not None else []
        try:
            criteria += parse_criteria(texts, named, floor.floor)
        except PlanError as error:
            raise PlanError(f"{error} ({floor}; --floor 1% overrides it)") from None
        lines.append(str(floor))
    return criteria, list(dict.fromkeys(lines))


def _path(root: Path, key: str) -> Path:
    return root / ".llenergy" / "floors" / f"{key}.json"


def _read(path: Path) -> dict[str, LearnedFloor]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, LearnedFloor])
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise PlanError(
            f"{path} is not a file of floors ({error}); delete it, and llenergy ab --aa writes it"
        ) from None
