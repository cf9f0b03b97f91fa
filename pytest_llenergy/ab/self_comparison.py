# SPDX-License-Identifier: Apache-2.0
"""Compare unchanged code with itself several times (A/A): how often this machine raises false alarms.

Everything but the measuring is done once: the comparisons share their checkouts and environments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, pstdev

import msgspec

import pytest_llenergy
from pytest_llenergy.ab.campaign import Callbacks, Campaign
from pytest_llenergy.ab.floors import (
    MIN_COMPARISONS,
    LearnedFloor,
    certain_change,
    device_key,
    estimate_floor,
    floors_directory,
    save_floors,
)
from pytest_llenergy.ab.schedule import format_duration
from pytest_llenergy.ab.sides import Prepared
from pytest_llenergy.ab.state import make_directory
from pytest_llenergy.compare.comparability import describe_devices
from pytest_llenergy.record.base import StoredStruct
from pytest_llenergy.record.comparison import VERDICTS, Comparison
from pytest_llenergy.record.defaults import MAX_FLOOR
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import PairedReport, Tool, encode_paired_report
from pytest_llenergy.record.text import one_line, short_test_name

#: The verdict that is a false alarm if nothing has changed.
ALARM = "regressed"


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

    Attributes:
        verdicts: How often it had each verdict.
        ratios: Estimates of head over base.
        spread: Standard deviation of their logarithms around no change.
        noise: Scatter of the rounds of a side, the median of the comparisons.
        detectable: Smallest change found nine times in ten, likewise.
    """

    id: str
    metric: str
    verdicts: dict[str, int]
    ratios: list[float]
    spread: float | None
    noise: float | None
    detectable: float | None


class SelfComparison(StoredStruct, frozen=True):
    """The result of ``llenergy ab --aa``.

    Attributes:
        date: Day of the last comparison (UTC).
        code: What was compared with itself.
        pairs: Pairs of rounds in each stage.
        comparisons: The number of finished comparisons.
        alarms: Comparisons with at least one test called regressed.
        test_alarms: The same for single tests, which are not independent of each other.
        notes: Floors that are too large to be kept.
        kept: Whether floors are used from now on.
    """

    tool: Tool
    date: str
    code: str
    pairs: str
    comparisons: int
    alarms: AlarmRate
    test_alarms: AlarmRate
    tests: list[RepeatedTest]
    floors: list[LearnedFloor]
    notes: list[str]
    kept: bool = False


def run_comparisons(prepared: Prepared, count: int, callbacks: Callbacks) -> Iterator[PairedReport]:
    """Measure comparisons one by one, and write each to ``.llenergy/aa``.

    Those of a stopped campaign are loaded.

    Raises:
        PlanError: If a session fails.
    """
    directory = prepared.root / ".llenergy" / "aa"
    make_directory(directory)
    make_directory(floors_directory(prepared.root))
    for number in range(1, count + 1):
        name = f"comparison {number} of {count}"
        campaign = Campaign(prepared, prepared.state.part(number), callbacks, name)
        paired = campaign.run()
        if number == 1:
            for earlier in directory.glob("*.json"):
                earlier.unlink()
        replace_file(directory / f"{number:03d}.json", encode_paired_report(paired))
        verdicts = Counter(each.verdict for each in paired.compared.comparisons)
        text = ", ".join(f"{verdicts[each]} {each}" for each in VERDICTS if verdicts[each])
        left_s = (count - number) * sum(campaign.durations_s)
        left = f"; about {format_duration(left_s)} left" if left_s else ""
        callbacks.say(f"[{name}] {text}{left}")
        yield paired


def summarize(reports: Sequence[PairedReport], code: str) -> SelfComparison:
    """Summarize at least one finished comparison."""
    by_test: dict[tuple[str, str], list[Comparison]] = {}
    for paired in reports:
        for each in paired.compared.comparisons:
            by_test.setdefault((each.id, each.metric), []).append(each)
    decided = [[each for each in paired.compared.comparisons if each.rule_applied] for paired in reports]
    alarming = [sum(each.verdict == ALARM for each in found) for found in decided]
    date = reports[-1].sessions[-1].started_at[:10]
    floors = _estimate_floors(reports, date)
    return SelfComparison(
        tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
        date=date,
        code=code,
        pairs=reports[0].pairs,
        comparisons=len(reports),
        alarms=_rate(sum(map(bool, alarming)), sum(map(bool, decided))),
        test_alarms=_rate(sum(alarming), sum(map(len, decided))),
        tests=[_summarize_test(found) for found in by_test.values()],
        floors=floors,
        notes=[
            f"the machine is too noisy for a floor of {each.metric}: {each.floor:.1%} is above "
            f"{MAX_FLOOR:.0%}, not kept"
            for each in floors
            if each.floor > MAX_FLOOR
        ],
    )


def keep_floors(root: Path, result: SelfComparison) -> SelfComparison:
    """Keep the floors for later comparisons of this project, unless they are too large.

    Too few comparisons are no basis for any.
    """
    usable = [each for each in result.floors if each.floor <= MAX_FLOOR]
    if result.comparisons < MIN_COMPARISONS or not usable:
        return result
    save_floors(root, usable)
    return msgspec.structs.replace(result, kept=True)


def render_self_comparison(result: SelfComparison) -> str:
    """Render the result as text: a table of the tests, then rates and floors."""
    several = len({each.metric for each in result.tests}) > 1
    head = ("test", *["metric"] * several, "noise", "spread", "ratios", "detectable", "verdicts")
    rows = [
        (
            one_line(short_test_name(each.id)),
            *[each.metric] * several,
            _percent(each.noise),
            _percent(each.spread),
            f"{min(each.ratios):.3f} … {max(each.ratios):.3f}" if each.ratios else "-",
            _percent(each.detectable),
            ", ".join(f"{count} {verdict}" for verdict, count in each.verdicts.items()),
        )
        for each in result.tests
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    lines.append("noise: scatter within a side; spread: scatter of the ratios of whole comparisons;")
    lines.append("detectable: smallest change found 9 times in 10")
    lines.append(f"false alarms: {result.alarms} comparisons, {result.test_alarms} tests; limits of 95%")
    for found in result.floors:
        counted = f"{found.estimates} estimate{'' if found.estimates == 1 else 's'}"
        lines.append(f"floor of {found.metric}: {found.floor:.1%}, {counted} on {found.devices}")
    lines += result.notes
    if not result.kept and not result.notes:
        lines.append(f"the floor is not kept: it needs {MIN_COMPARISONS} comparisons of a finished campaign")
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
    verdicts = Counter(each.verdict for each in found)
    ratios = [each.ratio for each in found if each.rule_applied and each.ratio is not None]
    return RepeatedTest(
        id=found[0].id,
        metric=found[0].metric,
        verdicts={each: verdicts[each] for each in VERDICTS if verdicts[each]},
        ratios=ratios,
        spread=pstdev(map(math.log, ratios), 0.0) if ratios else None,
        noise=_median([each.noise for each in found]),
        detectable=_median([each.detectable for each in found]),
    )


def _estimate_floors(reports: Sequence[PairedReport], date: str) -> list[LearnedFloor]:
    changes: dict[tuple[str, str, str], list[float]] = {}
    for paired in reports:
        records = {record.id: record for record in paired.base.records}
        for each in paired.compared.comparisons:
            change = certain_change(each)
            if each.id in records and each.rule_applied and change is not None:
                machine = records[each.id], paired.base.environment
                kind = device_key(*machine), each.metric, describe_devices(*machine)
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


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
