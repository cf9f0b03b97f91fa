# SPDX-License-Identifier: Apache-2.0
"""What became of a test against its baseline: verdicts, and what they are made of. JSON primitives only."""

from __future__ import annotations

from typing import Literal

from pytest_llenergy.model.base import EnergyKind, StoredStruct

#: The first four are verdicts of the rule. The others say why there is none: ``new`` and ``removed`` tests
#: are on one side only, ``invalid`` ones have no valid measurement on one, ``not comparable`` ones ran on
#: other devices or ran something else.
Verdict = Literal[
    "regressed", "improved", "unchanged", "inconclusive", "new", "removed", "invalid", "not comparable"
]

#: Verdicts of the rule.
RULE_VERDICTS: frozenset[Verdict] = frozenset({"regressed", "improved", "unchanged", "inconclusive"})

#: In the order in which people look at them.
VERDICTS: tuple[Verdict, ...] = (
    "regressed",
    "not comparable",
    "invalid",
    "inconclusive",
    "improved",
    "new",
    "removed",
    "unchanged",
)


class AppliedRule(StoredStruct, frozen=True):
    """The rule that a verdict was found by.

    Relative changes, but ``threshold_absolute`` in the unit of the metric; ``alpha`` is one-sided, of each
    limit.
    """

    threshold: float
    threshold_absolute: float
    floor: float
    tolerance: float
    alpha: float


class Comparison(StoredStruct, frozen=True):
    """One metric of one test against the same test of a baseline.

    ``ratio`` is head over base, ``low`` and ``high`` its one-sided limits, of which the rule says how sure
    they are. ``base`` and ``head`` are medians over ``n_base`` and ``n_head`` valid rounds, in ``unit``; a
    regression is the way that is not ``better``. ``noise`` is the relative scatter of the rounds of a side,
    ``detectable`` the least relative change that could have been found. ``gated`` says whether a gate was
    asked for. ``differences`` are the facts that make it not comparable, ``notes`` those that a reader should
    know although it is. Tokens per second of both sides stand beside, since joules may be bought with them.
    """

    id: str
    metric: str
    unit: str
    verdict: Verdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    base: float | None = None
    head: float | None = None
    n_base: int = 0
    n_head: int = 0
    better: Literal["less", "more"] = "less"
    noise: float | None = None
    detectable: float | None = None
    p: float | None = None
    kind: EnergyKind | None = None
    rule: AppliedRule | None = None
    gated: bool = False
    base_tokens_per_s: float | None = None
    head_tokens_per_s: float | None = None
    differences: list[str] = []
    notes: list[str] = []

    @property
    def judged(self) -> bool:
        """Whether the rule has found a verdict."""
        return self.verdict in RULE_VERDICTS


class Side(StoredStruct, frozen=True):
    """A report that was compared: where it was read from, and which run it is of.

    ``complete`` is false for a run that did not come to its end.
    """

    origin: str
    run_id: str
    started_at: str
    complete: bool
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class Baseline(StoredStruct, frozen=True):
    """What a run was compared with, and the tests of it that this run has not seen."""

    side: Side
    absent: list[str] = []


class ComparedReports(StoredStruct, frozen=True):
    """Two reports, test by test: what ``llenergy compare`` says."""

    base: Side
    head: Side
    comparisons: list[Comparison]
    devices: list[str] = []
    notes: list[str] = []
