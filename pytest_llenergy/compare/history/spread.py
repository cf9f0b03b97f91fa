# SPDX-License-Identifier: Apache-2.0
"""How much the level of a test differs between sessions, which rounds within a session do not show.

The estimate is the median distance between two sessions of one level: M. I. Shamos, "Geometry and
statistics", in Algorithms and Complexity (1976). It needs no estimate of the level, and a quarter of the
sessions may be outliers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from math import log, pi, sqrt
from pathlib import Path
from statistics import median

import msgspec

from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.history.store import Series, group_series, read_entries
from pytest_llenergy.compare.history.trend import EARLIER, NEWEST, find_changes
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.rule import NEEDS_SESSIONS, Rule
from pytest_llenergy.compare.statistics import SESSION_SPREAD, Design, Estimate, Sample, compare_samples
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import SESSIONS_DIFFER
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import one_line

#: Fewest sessions of a test for a spread. With fewer, a change of level is not found and would count as one.
MIN_SESSIONS = EARLIER + NEWEST

#: Standard deviation of a normal distribution over the median distance of two values:
#: 1 / (sqrt(2) Phi^-1(3/4)).
SHAMOS_TO_SIGMA = 1.0483

#: Least spread to assume, because few sessions may agree by chance, and largest to allow for: limits that
#: allow for more hide almost any regression.
MIN_SPREAD, MAX_SPREAD = 0.003, 0.05


class StoredEstimator:
    """Compares with a stored baseline: the limits allow for what sessions of the same code differ by.

    The spread is that of the test in the history, or else the typical one of the history, or else
    ``SESSION_SPREAD``. It is limited to ``MAX_SPREAD``, and a note gives the full value.
    """

    def __init__(
        self,
        root: Path | None,
        environment: Environment | None,
        say: Callable[[str], None],
        *,
        assumes: bool = True,
    ) -> None:
        self._say = say
        self._root = root
        self._assumes = assumes
        #: The machine of the head.
        self.environment = environment
        self._found: dict[tuple[str, str], dict[str, float]] = {}

    def __call__(self, record: Record, base: Sample, head: Sample, rule: Rule, metric: str) -> Estimate:
        """Decide on all rounds of both sessions."""
        known = self._spread(record, metric)
        spread = SESSION_SPREAD if known is None else known
        design = Design(session_spread=min(spread, MAX_SPREAD))
        estimate = compare_samples(base, head, rule, METRICS[metric].better, design)
        if known is None and not self._assumes and estimate.low is not None:
            reason = f"{NEEDS_SESSIONS}: one session a side does not show how much sessions differ"
            return estimate.changed_to("inconclusive", reason)
        if spread <= MAX_SPREAD or not estimate.design.session_spread:
            return estimate
        note = (
            f"{SESSIONS_DIFFER} by {spread:.0%}, and limits allow for {MAX_SPREAD:.0%}; llenergy ab decides"
        )
        return msgspec.structs.replace(estimate, corrections=(*estimate.corrections, note))

    def _spread(self, record: Record, metric: str) -> float | None:
        if self._root is None:
            return None
        key = metric, fingerprint(device_facts(record, self.environment))
        if key not in self._found:
            try:
                self._found[key] = find_spreads(self._root, metric, key[1])
            except ReportError as error:
                self._say(f"{one_line(str(error))}; limits allow for {SESSION_SPREAD:.1%} between sessions")
                self._root = None
                return None
        spreads = self._found[key]
        if not spreads:
            return None
        return max(spreads.get(record.id, median(spreads.values())), MIN_SPREAD)


def find_spreads(root: Path, metric: str, device_key: str) -> dict[str, float]:
    """Return the spread of each test that has enough sessions on one kind of devices, by its id.

    This is the standard deviation of the logarithm of the level between sessions. Changes of level do not
    count, nor does the noise of the rounds. Zero means that the noise of the rounds explains all differences.
    """
    wanted = metric, ROUND_METRICS[metric].unit, device_key
    entries = [each for each in read_entries(root) if (each.metric, each.unit, each.device_key) == wanted]
    found = {each.last.id: _find_spread(each) for each in group_series(entries)}
    return {test: spread for test, spread in found.items() if spread is not None}


def _find_spread(series: Series) -> float | None:
    entries = series.entries
    values = [entry.value for entry in entries]
    if len(values) < MIN_SESSIONS or min(values) <= 0:
        return None
    borders = [0, *find_changes(values), len(values)]
    distances = [
        abs(log(first / second))
        for start, end in pairwise(borders)
        for first, second in combinations(values[start:end], 2)
    ]
    if not distances:
        return None
    # The variance of a median of n rounds is pi / 2 n times that of a round.
    of_rounds = median(pi / 2 * (entry.noise or 0.0) ** 2 / entry.n for entry in entries)
    return sqrt(max(0.0, (SHAMOS_TO_SIGMA * median(distances)) ** 2 - of_rounds))
