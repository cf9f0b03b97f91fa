# SPDX-License-Identifier: Apache-2.0
"""Compare unchanged code with itself several times (A/A): how often this machine raises false alarms.

Everything but the measuring is done once: the comparisons share their checkouts and environments. What they
teach is the floor of the machine: by how much comparisons of unchanged code have been certain of a change on
it. Each kind of device has a file in ``.llenergy/floors`` of the project. Its name is the fingerprint of its
facts, so that another machine of the same kind uses it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from pytest_llenergy.ab.campaign import Callbacks, Campaign
from pytest_llenergy.ab.sides import Prepared
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import describe_devices, device_facts, fingerprint
from pytest_llenergy.compare.comparison import DEFAULT_METRICS
from pytest_llenergy.compare.gate import rule_with_floor
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import MALFORMED, Count, StoredStruct
from pytest_llenergy.record.comparison import VERDICTS, Comparison
from pytest_llenergy.record.defaults import MAX_FLOOR
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import PairedReport, Report
from pytest_llenergy.record.text import one_line, short_test_name

#: Share of the comparisons that the floor keeps from being certain of a change; it is rounded up to a step.
QUANTILE, STEP = 0.95, 0.001

#: The directory of the learned floors of a project.
FLOORS = Path(".llenergy", "floors")

#: Fewer comparisons are no basis for a floor.
MIN_COMPARISONS = 5


class LearnedFloor(StoredStruct, frozen=True):
    """The floor of a metric, a relative change, on a kind of device, whose fingerprint is ``key``.

    ``estimates`` counts the comparisons of single tests. ``date`` is the day of the last one (UTC).
    """

    key: str
    metric: str
    floor: Annotated[float, msgspec.Meta(ge=0)]
    comparisons: Count
    estimates: Count
    date: str
    devices: str


def compare_with_itself(prepared: Prepared, count: int, callbacks: Callbacks) -> list[str]:
    """Measure the comparisons, those of a stopped campaign excepted, and keep the floors.

    Returns:
        A line for each test, then alarms and floors.
    """
    reports = []
    for number in range(1, count + 1):
        name = f"comparison {number} of {count}"
        reports.append(Campaign(prepared, prepared.state.part(number), callbacks, name).run())
        callbacks.say(f"[{name}] {_list_verdicts(reports[-1].compared.comparisons)}")
    found = [[each for each in paired.compared.comparisons if each.rule_applied] for paired in reports]
    if not any(found):
        raise PlanError("no test could be compared with itself")
    by_test: dict[tuple[str, str], list[Comparison]] = {}
    for each in (each for paired in reports for each in paired.compared.comparisons):
        by_test.setdefault((each.id, each.metric), []).append(each)
    lines = [_describe_test(each) for each in by_test.values()]
    alarms = sum(any(each.verdict == "regressed" for each in comparisons) for comparisons in found)
    lines.append(f"false alarms: {alarms} of {sum(map(bool, found))} comparisons")
    floors = estimate_floors(reports)
    for learned in floors:
        large = f"; above {MAX_FLOOR:.0%}, too large to be kept" if learned.floor > MAX_FLOOR else ""
        lines.append(
            f"floor of {learned.metric}: {learned.floor:.1%}, estimates: {learned.estimates}, "
            f"on {learned.devices}{large}"
        )
    if count < MIN_COMPARISONS:
        return [*lines, f"the floor is not kept: it needs {MIN_COMPARISONS} comparisons"]
    save_floors(prepared.root, [each for each in floors if each.floor <= MAX_FLOOR])
    return lines


def _describe_test(found: Sequence[Comparison]) -> str:
    ratios = [each.ratio for each in found if each.rule_applied and each.ratio is not None]
    detectable = [each.detectable for each in found if each.detectable is not None]
    shown = [_list_verdicts(found)]
    shown += [f"ratios {min(ratios):.3f} … {max(ratios):.3f}"] if ratios else []
    shown += [f"finds {median(detectable):.1%}"] if detectable else []
    return f"{one_line(short_test_name(found[0].id))}, {found[0].metric}: {'; '.join(shown)}"


def _list_verdicts(found: Iterable[Comparison]) -> str:
    counts = Counter(each.verdict for each in found)
    return ", ".join(f"{counts[each]} {each}" for each in VERDICTS if counts[each])


def estimate_floors(reports: Sequence[PairedReport]) -> list[LearnedFloor]:
    """Estimate the floor of each metric on each kind of device: what 95 % of certain changes do not exceed.

    A change is certain as far as the nearer limit is from no change. The scatter of rounds therefore does not
    count, only what it does not explain. Of fewer than 20 comparisons, the largest counts.
    """
    changes: dict[tuple[str, str, str], list[float]] = {}
    for paired in reports:
        records = {record.id: record for record in paired.base.records}
        for each in paired.compared.comparisons:
            if each.id in records and each.rule_applied and each.high is not None and (each.low or 0.0) > 0:
                machine = records[each.id], paired.base.environment
                kind = fingerprint(device_facts(*machine)), each.metric, describe_devices(*machine)
                certain = max((each.low or 1.0) - 1, 1 / each.high - 1, 0.0)
                changes.setdefault(kind, []).append(certain)
    floors = []
    for (key, metric, devices), found in changes.items():
        chosen = sorted(found)[math.ceil(QUANTILE * len(found)) - 1]
        floors.append(
            LearnedFloor(
                key=key,
                metric=metric,
                # Rounding errors must not raise a floor of exactly a step to the next one.
                floor=round(math.ceil(chosen / STEP - 1e-9) * STEP, 6),
                comparisons=len(reports),
                estimates=len(found),
                date=reports[-1].sessions[-1].started_at[:10],
                devices=devices,
            )
        )
    return floors


def save_floors(root: Path, floors: Sequence[LearnedFloor]) -> None:
    """Write floors to the file of their kind of device. Those of other metrics are kept."""
    for key in {each.key for each in floors}:
        path = root / FLOORS / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = {each.metric: each for each in [*_read(path), *floors] if each.key == key}
        replace_file(path, msgspec.json.format(msgspec.json.encode([*merged.values()])) + b"\n")


def apply_floors(
    criteria: Sequence[Criterion], root: Path, report: Report
) -> tuple[list[Criterion], list[str]]:
    """Return criteria with learned floors above their own, and a line for each that is used.

    The machine is that of a comparison's first report; of several kinds of device the largest floor counts.
    """
    measured = [record for record in report.records if record.rounds]
    keys = {fingerprint(device_facts(record, report.environment)) for record in measured}
    learned = [each for key in sorted(keys) for each in _read(root / FLOORS / f"{key}.json")]
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


def _read(path: Path) -> list[LearnedFloor]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LearnedFloor])
    except FileNotFoundError:
        return []
    except (OSError, *MALFORMED) as error:
        raise PlanError(
            f"{path} is not a file of floors ({error}); delete it, and llenergy ab --aa writes it"
        ) from None
