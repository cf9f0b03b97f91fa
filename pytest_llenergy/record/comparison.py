# SPDX-License-Identifier: Apache-2.0
"""Verdicts: a test against its baseline. JSON primitives only."""

from __future__ import annotations

from typing import Literal

from pytest_llenergy.record.base import EnergyKind, Status, StoredStruct
from pytest_llenergy.record.defaults import Inconclusive

#: The first five come from the statistical rule; ``worse`` is certain, but below the threshold. The others
#: say why the rule was not applied: ``new`` tests exist on the head only, or did not pass on the baseline;
#: ``removed`` ones exist on the baseline only, ``invalid`` ones lack a valid measurement on one side,
#: ``not comparable`` ones ran on other devices or ran another workload, and
#: ``no value`` ones have the metric on neither side.
Verdict = Literal[
    "regressed",
    "worse",
    "improved",
    "unchanged",
    "inconclusive",
    "new",
    "removed",
    "invalid",
    "not comparable",
    "no value",
]

#: Reason of a test that the head does not have.
ONLY_IN_BASELINE = "only in the baseline"

#: Beginnings of notes: on a workload that differs although the comparison was made, and on what the rounds
#: were corrected for.
OTHER_WORKLOAD = "different workload: "
CORRECTED = "corrected for "

#: Beginning of a note or reason that outputs differ.
OUTPUTS_DIFFER = "outputs differ: "

#: Beginnings of notes without which a verdict may be misunderstood.
ESSENTIAL_NOTES = (OTHER_WORKLOAD, CORRECTED, OUTPUTS_DIFFER)

#: Verdicts of the statistical rule.
RULE_VERDICTS: frozenset[Verdict] = frozenset({"regressed", "worse", "improved", "unchanged", "inconclusive"})

#: Most urgent first: the order in which verdicts are shown.
VERDICTS: tuple[Verdict, ...] = (
    "regressed",
    "not comparable",
    "invalid",
    "worse",
    "inconclusive",
    "improved",
    "new",
    "removed",
    "unchanged",
    "no value",
)


class AppliedRule(StoredStruct, frozen=True):
    """The rule behind a verdict.

    ``threshold``, ``floor`` and ``tolerance`` are relative changes, ``threshold_absolute`` is in the unit of
    the metric. ``alpha`` is the one-sided error probability of each limit.
    """

    threshold: float
    threshold_absolute: float
    floor: float
    tolerance: float
    alpha: float


class Comparison(StoredStruct, frozen=True):
    """One metric of one test against the same test of a baseline.

    Attributes:
        ratio: Head over base, with one-sided limits ``low`` and ``high`` at the ``alpha`` of ``rule``.
        base: Value of the metric over ``n_base`` valid rounds, in ``unit``; ``head`` likewise. Outputs for
            people show ``estimated_head`` instead.
        better: Direction of an improvement.
        noise: Relative scatter of the rounds of one side.
        detectable: Smallest relative change that this comparison could have found.
        p: P-value of no regression.
        session_spread: Relative standard deviation of the level between sessions that the limits allow for;
            null if both sides were measured in turn.
        kind: Whether the joules are measured, attributed or estimated; null for times and counts.
        gated: Whether a gate was requested for this metric.
        from_mark: Whether a mark of the test requested it.
        base_tokens_per_s: Throughput, because energy can be saved by being slow; ``head_tokens_per_s``
            likewise.
        base_status: Status of the test in the baseline if it was not measured there; it is then new and not
            gated.
        differences: Facts that make the sides not comparable.
        notes: Facts that a reader should know although the sides are comparable.
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
    session_spread: float | None = None
    kind: EnergyKind | None = None
    rule: AppliedRule | None = None
    gated: bool = False
    from_mark: bool = False
    base_tokens_per_s: float | None = None
    head_tokens_per_s: float | None = None
    base_status: Status | None = None
    differences: list[str] = []
    notes: list[str] = []

    @property
    def rule_applied(self) -> bool:
        """Whether the statistical rule was applied."""
        return self.verdict in RULE_VERDICTS

    @property
    def estimated_head(self) -> float | None:
        """``base`` times ``ratio``, to show beside the change, or ``head`` without an estimate.

        The ratio is the median over all pairs of rounds, so the ratio of the two medians may differ from it.
        """
        return self.head if self.base is None or self.ratio is None else self.base * self.ratio

    @property
    def kind_label(self) -> str:
        """Text after the value of the head if its joules are not simply measured: `` (estimated)``."""
        return f" ({self.kind})" if self.head is not None and self.kind not in ("measured", None) else ""


class ReportSource(StoredStruct, frozen=True):
    """One report of a comparison: where it was read from, and its run.

    ``complete`` is false for a run that was interrupted.
    """

    origin: str
    run_id: str
    started_at: str
    complete: bool
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class Baseline(StoredStruct, frozen=True):
    """The report that a run was compared with, and its tests that are absent from the run."""

    side: ReportSource
    absent: list[str] = []


class ComparedReports(StoredStruct, frozen=True):
    """Two reports, test by test: the result of ``llenergy compare``.

    ``inconclusive`` is how the gate treats tests that could not be judged: inconclusive and removed ones.
    """

    base: ReportSource
    head: ReportSource
    comparisons: list[Comparison]
    devices: list[str] = []
    notes: list[str] = []
    inconclusive: Inconclusive = "warn"
