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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

import pytest_llenergy
from pytest_llenergy.ab.campaign import Callbacks, Campaign
from pytest_llenergy.ab.sides import Prepared, format_duration
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import describe_devices, device_facts, fingerprint
from pytest_llenergy.compare.comparison import DEFAULT_METRICS
from pytest_llenergy.compare.gate import rule_with_floor
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import MALFORMED, Count, StoredStruct
from pytest_llenergy.record.comparison import VERDICTS, Comparison
from pytest_llenergy.record.defaults import MAX_FLOOR
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.report import PairedReport, Report, Tool, encode_paired_report
from pytest_llenergy.record.text import one_line, short_test_name

#: Share of the comparisons that the floor keeps from being certain of a change; it is rounded up to a step.
QUANTILE, STEP = 0.95, 0.001

#: The directory of the learned floors of a project, and that of all rounds, which is not to be committed.
FLOORS, ALL_ROUNDS = Path(".llenergy", "floors"), Path(".llenergy", "ab", "aa")

#: Fewer comparisons are no basis for a floor.
MIN_COMPARISONS = 5


class AlarmRate(StoredStruct, frozen=True):
    """Alarms among comparisons, with the 95 % limits of their share (Wilson)."""

    alarms: int
    count: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.alarms} of {self.count} ({self.low:.1%} to {self.high:.1%})"


class RepeatedTest(StoredStruct, frozen=True):
    """One metric of one test over all comparisons.

    ``detectable`` is the smallest change found nine times in ten, the median of the comparisons.
    """

    id: str
    metric: str
    verdicts: dict[str, int]
    ratios: list[float]
    detectable: float | None


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


class SelfComparison(StoredStruct, frozen=True):
    """The result of ``llenergy ab --aa``.

    ``alarms`` are comparisons with at least one test called regressed. If ``kept``, floors are used from now
    on.
    """

    tool: Tool
    date: str
    code: str
    pairs: str
    comparisons: int
    alarms: AlarmRate
    tests: list[RepeatedTest]
    floors: list[LearnedFloor]
    kept: bool = False


def run_comparisons(prepared: Prepared, count: int, callbacks: Callbacks) -> Iterator[PairedReport]:
    """Measure comparisons one by one, and write each to ``ALL_ROUNDS``.

    Those of a stopped campaign are loaded.
    """
    directory = prepared.root / ALL_ROUNDS
    directory.mkdir(exist_ok=True)
    for number in range(1, count + 1):
        name = f"comparison {number} of {count}"
        campaign = Campaign(prepared, prepared.state.part(number), callbacks, name)
        paired = campaign.run()
        if number == 1:
            for earlier in directory.glob("*.json"):
                earlier.unlink()
        replace_file(directory / f"{number:03d}.json", encode_paired_report(paired))
        left_s = (count - number) * sum(campaign.durations_s)
        left = f"; about {format_duration(left_s)} left" if left_s else ""
        callbacks.say(f"[{name}] {_list_verdicts(_count_verdicts(paired.compared.comparisons))}{left}")
        yield paired


def summarize(reports: Sequence[PairedReport], code: str) -> SelfComparison:
    """Summarize at least one finished comparison."""
    by_test: dict[tuple[str, str], list[Comparison]] = {}
    for paired in reports:
        for each in paired.compared.comparisons:
            by_test.setdefault((each.id, each.metric), []).append(each)
    decided = [[each for each in paired.compared.comparisons if each.rule_applied] for paired in reports]
    alarming = [any(each.verdict == "regressed" for each in found) for found in decided]
    date = reports[-1].sessions[-1].started_at[:10]
    return SelfComparison(
        tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
        date=date,
        code=code,
        pairs=reports[0].pairs,
        comparisons=len(reports),
        alarms=_rate(sum(alarming), sum(map(bool, decided))),
        tests=[_summarize_test(found) for found in by_test.values()],
        floors=estimate_floors(reports, date),
    )


def keep_floors(root: Path, result: SelfComparison) -> SelfComparison:
    """Keep the floors for later comparisons of this project, unless they are too large or of too few."""
    usable = [each for each in result.floors if each.floor <= MAX_FLOOR]
    if result.comparisons < MIN_COMPARISONS or not usable:
        return result
    save_floors(root, usable)
    return msgspec.structs.replace(result, kept=True)


def render_self_comparison(result: SelfComparison) -> str:
    """Render the result as text: a line for each test, then alarms and floors."""
    lines = []
    for each in result.tests:
        shown = [_list_verdicts(each.verdicts)]
        shown += [f"ratios {min(each.ratios):.3f} … {max(each.ratios):.3f}"] if each.ratios else []
        shown += [f"finds {each.detectable:.1%}"] if each.detectable is not None else []
        lines.append(f"{one_line(short_test_name(each.id))}, {each.metric}: {'; '.join(shown)}")
    lines.append(f"false alarms: {result.alarms} comparisons; limits of 95%")
    for found in result.floors:
        large = f"; above {MAX_FLOOR:.0%}, too large to be kept" if found.floor > MAX_FLOOR else ""
        lines.append(
            f"floor of {found.metric}: {found.floor:.1%}, estimates: {found.estimates}, "
            f"on {found.devices}{large}"
        )
    if result.comparisons < MIN_COMPARISONS:
        lines.append(f"the floor is not kept: it needs {MIN_COMPARISONS} comparisons")
    return "\n".join(lines)


def wilson_limits(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % limits of a share: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927)."""
    if count == 0:
        return 0.0, 1.0
    z = 1.959964
    share, spread = hits / count, z * z / count
    center = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, center - half), min(1.0, center + half)


def _rate(hits: int, count: int) -> AlarmRate:
    low, high = wilson_limits(hits, count)
    return AlarmRate(alarms=hits, count=count, low=low, high=high)


def _summarize_test(found: Sequence[Comparison]) -> RepeatedTest:
    detectable = [each.detectable for each in found if each.detectable is not None]
    return RepeatedTest(
        id=found[0].id,
        metric=found[0].metric,
        verdicts=_count_verdicts(found),
        ratios=[each.ratio for each in found if each.rule_applied and each.ratio is not None],
        detectable=median(detectable) if detectable else None,
    )


def _count_verdicts(found: Sequence[Comparison]) -> dict[str, int]:
    counts = Counter(each.verdict for each in found)
    return {each: counts[each] for each in VERDICTS if counts[each]}


def _list_verdicts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def certain_change(comparison: Comparison) -> float | None:
    """Return how far the nearer limit of a comparison is from no change; 0 if the limits include it.

    The scatter of rounds therefore does not count, only what it does not explain.
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
        found = msgspec.json.decode(read_limited(path), type=list[LearnedFloor])
    except FileNotFoundError:
        return []
    except (OSError, *MALFORMED) as error:
        raise PlanError(
            f"{path} is not a file of floors ({error}); delete it, and llenergy ab --aa writes it"
        ) from None
    return [each for each in found if each.floor <= MAX_FLOOR]
