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
from pytest_llenergy.ab.floors import LearnedFloor, estimate_floors, floors_directory, save_floors
from pytest_llenergy.ab.schedule import format_duration
from pytest_llenergy.ab.sides import Prepared
from pytest_llenergy.ab.state import make_directory
from pytest_llenergy.record.base import StoredStruct
from pytest_llenergy.record.comparison import VERDICTS, Comparison
from pytest_llenergy.record.defaults import MAX_FLOOR
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import PairedReport, Tool, encode_paired_report
from pytest_llenergy.record.text import one_line, short_test_name

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
    alarming = [sum(each.verdict == "regressed" for each in found) for found in decided]
    date = reports[-1].sessions[-1].started_at[:10]
    return SelfComparison(
        tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
        date=date,
        code=code,
        pairs=reports[0].pairs,
        comparisons=len(reports),
        alarms=_rate(sum(map(bool, alarming)), sum(map(bool, decided))),
        test_alarms=_rate(sum(alarming), sum(map(len, decided))),
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
    """Render the result as text: a table of the tests, then rates and floors."""
    rows = [("test", "metric", "noise", "spread", "ratios", "detectable", "verdicts")]
    rows += [
        (
            one_line(short_test_name(each.id)),
            each.metric,
            _percent(each.noise),
            _percent(each.spread),
            f"{min(each.ratios):.3f} … {max(each.ratios):.3f}" if each.ratios else "-",
            _percent(each.detectable),
            _list_verdicts(each.verdicts),
        )
        for each in result.tests
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append("noise: scatter within a side; spread: scatter of the ratios of whole comparisons;")
    lines.append("detectable: smallest change found 9 times in 10")
    lines.append(f"false alarms: {result.alarms} comparisons, {result.test_alarms} tests; limits of 95%")
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
    ratios = [each.ratio for each in found if each.rule_applied and each.ratio is not None]
    return RepeatedTest(
        id=found[0].id,
        metric=found[0].metric,
        verdicts=_count_verdicts(found),
        ratios=ratios,
        spread=pstdev(map(math.log, ratios), 0.0) if ratios else None,
        noise=_median([each.noise for each in found]),
        detectable=_median([each.detectable for each in found]),
    )


def _count_verdicts(found: Sequence[Comparison]) -> dict[str, int]:
    counts = Counter(each.verdict for each in found)
    return {each: counts[each] for each in VERDICTS if counts[each]}


def _list_verdicts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
