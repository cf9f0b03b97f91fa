# SPDX-License-Identifier: Apache-2.0
"""Compare unchanged code with itself several times (A/A): how often this machine raises false alarms.

Everything but the measuring is done once: the comparisons share their checkouts and environments. What they
teach is the floor of the machine: by how much comparisons of unchanged code have been certain of a change on
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from pytest_llenergy.ab.campaign import Callbacks, Campaign
from pytest_llenergy.ab.sides import Prepared
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.comparison import VERDICTS, Comparison
from pytest_llenergy.record.defaults import FLOOR
from pytest_llenergy.record.text import one_line, short_test_name

#: Share of the comparisons that the floor keeps from being certain of a change; it is rounded up to a step.
QUANTILE, STEP = 0.95, 0.001

#: Fewer comparisons are no basis for a floor.
MIN_COMPARISONS = 5


def compare_with_itself(prepared: Prepared, count: int, callbacks: Callbacks) -> list[str]:
    """Measure the comparisons, but those that a stopped campaign has finished.

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
    by_metric: dict[str, list[Comparison]] = {}
    for each in (each for comparisons in found for each in comparisons):
        by_metric.setdefault(each.metric, []).append(each)
    return [*lines, *(_describe_floor(name, each, count) for name, each in by_metric.items())]


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


def _describe_floor(metric: str, found: Sequence[Comparison], count: int) -> str:
    floor = estimate_floor(found)
    if count < MIN_COMPARISONS:
        use = f"too few for a floor: it needs {MIN_COMPARISONS} comparisons"
    elif floor > FLOOR:
        use = f"use it by --floor={floor * 100:.3g}%"
    else:
        use = f"the default of {FLOOR:.0%} is right"
    return f"floor of {metric}: {floor:.1%}; {use}"


def estimate_floor(found: Sequence[Comparison]) -> float:
    """Return what 95 % of the certain changes do not exceed; of fewer than 20 comparisons, the largest.

    A change is certain as far as the nearer limit is from no change. The scatter of rounds therefore does not
    count, only what it does not explain.
    """
    certain = [
        max((each.low or 1.0) - 1, 1 / each.high - 1, 0.0)
        for each in found
        if each.high is not None and each.high > 0
    ]
    chosen = sorted(certain or [0.0])[math.ceil(QUANTILE * len(certain)) - 1]
    # Rounding errors must not raise a floor of exactly a step to the next one.
    return round(math.ceil(chosen / STEP - 1e-9) * STEP, 6)
