# SPDX-License-Identifier: Apache-2.0
"""What is known of a test while it runs, from which ``recorder`` builds its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.window import Window
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.record.base import Status
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.load_curve import LoadCurve
from pytest_llenergy.record.record import (
    BackendInfo,
    BoardSettings,
    CustomMetric,
    Flag,
    MeterInfo,
    Metric,
    Parallel,
    RankInfo,
)

if TYPE_CHECKING:
    from pytest_llenergy.hosts.gangs import GangLease

NOTHING_MEASURED = "the test uses energy but measured nothing: it did not call energy(...), or that raised"


@dataclass
class Draft:
    """Data collected so far for the record of a test."""

    lease: Lease | None = None
    #: What the test holds on the hosts of a cluster.
    gang: GangLease | None = None
    fallback: str | None = None
    meters: list[MeterInfo] = field(default_factory=list)
    parallel: Parallel | None = None
    backend: BackendInfo | None = None
    ranks: tuple[RankInfo, ...] = ()
    rank_peak_memory_bytes: list[int | None] = field(default_factory=list)
    launch: str | None = None
    start_method: str | None = None
    start_s: float | None = None
    lease_wait_s: float | None = None
    host_exclusive: bool = False
    settings: Sequence[BoardSettings] = ()
    flags: list[Flag] = field(default_factory=list)
    experiment: Experiment | None = None
    #: What ``energy`` had measured when it raised. Its rounds are recorded unless the record counts.
    unfinished: Experiment | None = None
    load_curve: LoadCurve | None = None
    windows: list[Window] = field(default_factory=list)
    #: What the test wrote; any objects, converted by ``json_values``.
    extra_info: dict[str, Any] = field(default_factory=dict)
    #: Custom metrics by name.
    custom: dict[str, tuple[Metric, CustomMetric]] = field(default_factory=dict)
    #: Digests of the outputs of greedy work (``Record.outputs``).
    outputs: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    failed_gate: bool = False
    failed_subtests: int = 0
    #: Why a benchmark of another plugin was not measured, which does not fail the test.
    unmeasured: str | None = None
    #: Whether the record was handed to the controller.
    delivered: bool = False
    #: Whether the measured code runs in this process, on every device that this process may use.
    in_process: bool = False

    @property
    def metrics(self) -> dict[str, Metric]:
        """All metrics of the test so far."""
        measured = self.experiment.metrics if self.experiment is not None else {}
        return {**measured, **{name: metric for name, (metric, _) in self.custom.items()}}

    def keep_unfinished(self, experiment: Experiment) -> None:
        """Keep what ``energy`` has measured, which is about to raise, unless an earlier call got further."""
        if self.unfinished is None or len(experiment.rounds) >= len(self.unfinished.rounds):
            self.unfinished = experiment

    def forget_ranks(self) -> None:
        """Remove the description of ranks, since the measured code runs in pytest's own process."""
        self.parallel = self.backend = self.launch = self.start_method = self.start_s = None
        self.ranks = ()

    def status_if_passed(self) -> tuple[Status, str | None]:
        """Return the status of a test whose body has passed, and the reason unless it was measured."""
        if self.experiment is not None:
            energy = self.experiment.metrics["energy_j"]
            return ("measured", None) if energy.value is not None else ("invalid", energy.reason)
        windows = [window.record for window in self.windows if window.ended]
        if windows:
            missing = [window.reason for window in windows if window.energy_j is None]
            return ("invalid", missing[0]) if missing else ("measured", None)
        return "invalid", self.unmeasured or NOTHING_MEASURED


DRAFT = pytest.StashKey[Draft]()


def draft_of(item: pytest.Item) -> Draft:
    """Return the draft of a test, created on first use."""
    return item.stash.setdefault(DRAFT, Draft())
