# SPDX-License-Identifier: Apache-2.0
"""One measured test: JSON primitives only, units in the names; missing is ``None`` plus a reason."""

from __future__ import annotations

from typing import Literal

from pytest_llenergy.model.base import EnergyKind, Primitive, StoredStruct
from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.environment import Board

Status = Literal["measured", "invalid", "failed", "skipped", "crashed"]
Severity = Literal["note", "warning", "invalid"]


class Flag(StoredStruct, frozen=True):
    """Something a reader must know about a number. ``invalid`` means: this is no result."""

    name: str
    severity: Severity
    detail: str


class Metric(StoredStruct, frozen=True):
    """One figure of a test over ``n`` rounds.

    ``uncertainty`` is the standard uncertainty (k = 1) for comparing runs on the same devices, of which
    ``spread`` is what the scatter of the rounds shows; ``uncertainty_absolute`` adds what is common to all
    runs (gain of the meter, model of an estimate). ``source`` is where a figure is from that is of no round.
    """

    value: float | None
    unit: str
    uncertainty: float | None = None
    spread: float | None = None
    uncertainty_absolute: float | None = None
    n: int = 0
    reason: str | None = None
    source: str | None = None


class Terms(StoredStruct, frozen=True):
    """What is not known of an energy, by cause, as standard uncertainties in joules.

    ``edges_j``: when the counter ticked, and how power went between ticks at the edges of the window.
    ``outside_j``: the power outside the window, between its edges and the nearest ticks.
    ``resolution_j``: the steps of the counter. ``coverage_j``: what a part-time sensor did not see.
    """

    edges_j: float
    outside_j: float
    resolution_j: float
    coverage_j: float


class DomainEnergy(StoredStruct, frozen=True):
    """Joules of one domain (``gpu:GPU-…``, ``cpu:package-0``, ``cpu:host``) in one window.

    ``terms`` split its uncertainty by cause. ``low_j`` and ``high_j`` are the limits that the source's own
    accuracy sets on the true value.
    """

    energy_j: float | None
    energy_u_j: float | None
    kind: EnergyKind
    terms: Terms | None = None
    low_j: float | None = None
    high_j: float | None = None
    reason: str | None = None


class Phase(StoredStruct, frozen=True):
    """A part of a round, summed over its iterations. Phases follow one another and fill the round.

    ``output_tokens`` are those that came in it, told for the phases of a served load.
    """

    name: str
    duration_s: float
    energy_j: float | None
    energy_u_j: float | None
    terms: Terms | None = None
    reason: str | None = None
    output_tokens: int | None = None


class ServedRequests(StoredStruct, frozen=True):
    """The requests of a served load in the order in which they were sent, a column for each fact.

    ``sent_s`` counts from the start of the round. Latencies (seconds) begin when a request is sent: to its
    first token, and to its last; ``inter_token_latency_s`` is the mean over the gaps between its tokens,
    ``None`` where there is no gap.
    """

    sent_s: list[float]
    time_to_first_token_s: list[float]
    inter_token_latency_s: list[float | None]
    end_to_end_latency_s: list[float]
    output_tokens: list[int]


class Tokens(StoredStruct, frozen=True):
    """Token counts summed over requests: prompts without padding, outputs as produced."""

    input: int
    output: int


class Round(StoredStruct, frozen=True):
    """One repetition: ``iterations`` of the work, one straight after the other.

    Joules, seconds, tokens and requests are those of the whole round. ``phase`` is where in a tick of the
    slowest counter it started, from 0 to 1. ``energy_u_j`` is the standard uncertainty for comparing on
    the same devices, split by cause in ``terms``; ``energy_u_absolute_j`` adds the accuracy of the
    sources. ``idle_power_w`` is the power in the quiet gaps around the round, context alive.
    ``other_cpu_s`` is CPU time that processes outside the measured ones used meanwhile, ``stolen_cpu_s``
    what a hypervisor gave to other guests although this one wanted it.
    """

    start_s: float
    duration_s: float
    energy_j: float | None
    energy_u_j: float | None
    energy_u_absolute_j: float | None
    iterations: int = 1
    phase: float | None = None
    terms: Terms | None = None
    idle_power_w: float | None = None
    idle_power_u_w: float | None = None
    by_domain: dict[str, DomainEnergy] = {}
    phases: list[Phase] = []
    tokens: Tokens | None = None
    requests: int | None = None
    time_to_first_token_s: float | None = None
    inter_token_latency_s: float | None = None
    served: ServedRequests | None = None
    temperature_start_c: float | None = None
    other_cpu_s: float | None = None
    stolen_cpu_s: float | None = None
    flags: list[Flag] = []
    reason: str | None = None


class Window(StoredStruct, frozen=True):
    """One named window of the ``energy_meter`` fixture. Times are monotonic seconds."""

    name: str
    start_s: float
    duration_s: float
    energy_j: float | None
    energy_u_j: float | None
    energy_u_absolute_j: float | None
    by_domain: dict[str, DomainEnergy]
    flags: list[Flag] = []
    reason: str | None = None


class DomainPower(StoredStruct, frozen=True):
    """The course of power of one domain: ``power_w[i]`` is the mean (W) from ``edges_s[i]`` to ``[i + 1]``.

    Edges are seconds from the start of the round, negative before it; its start, 0, and its end are among
    them, and the joules between these two are those of the round. Between them lie the ticks of the counter,
    or fewer where there are many. ``kind`` says whether it was measured.
    """

    kind: EnergyKind
    edges_s: list[float]
    power_w: list[float]


class PhaseSpan(StoredStruct, frozen=True):
    """A phase of one iteration, in seconds from the start of the round."""

    name: str
    start_s: float
    end_s: float


class PowerTrace(StoredStruct, frozen=True):
    """How power went in one round and in the quiet right before and after it.

    The round is the one of median energy among the valid ones; ``start_s`` (monotonic) and ``duration_s`` are
    its own. ``spans`` are its phases in order, empty where the engine does not say or there are too many of
    them to be seen.
    """

    start_s: float
    duration_s: float
    by_domain: dict[str, DomainPower]
    spans: list[PhaseSpan] = []


class MeterInfo(StoredStruct, frozen=True):
    """One domain that was read, and how.

    ``resolution_j`` is the smallest step of its counter, ``coverage`` the share of the time in which its
    sensor looks. ``exclusive`` says whether the test had leased for itself all that the meter reads.
    """

    name: str
    domain: str
    kind: EnergyKind
    source: str
    scope: str
    update_period_s: float | None
    resolution_j: float | None
    accuracy: str
    coverage: float = 1.0
    exclusive: bool = False


class Procedure(StoredStruct, frozen=True):
    """How a test was measured.

    ``settled`` says whether the warm-up met ``criterion`` before its cap, ``None`` where its length was
    given. ``iterations`` were chosen for each round so that its uncertainty meets ``target`` (a relative
    standard uncertainty of ``energy_j``), rounds were added until it was met or ``budget_s`` was spent;
    ``reached`` is what it came to.
    """

    warmup_iterations: int
    settled: bool | None
    criterion: str
    iterations: int
    gap_s: float
    target: float
    budget_s: float
    measuring_s: float
    reached: float | None


class RankInfo(StoredStruct, frozen=True):
    """One worker process as it was seen running, not as it was asked for; ``localhost`` is pytest's own.

    ``workers`` are the pids of the processes that an engine in it has started itself.
    """

    rank: int
    local_rank: int
    pid: int
    device: str
    threads: int | None = None
    cpus: list[int] | None = None
    host: str = "localhost"
    workers: list[int] = []


class Parallel(StoredStruct, frozen=True):
    """Parallel degrees. Their product is the number of devices.

    ``placement`` is the number of devices that the layers of one model are spread over in one process. They
    work in turn.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    placement: int = 1


class BackendInfo(StoredStruct, frozen=True):
    """The engine that ran and everything that it was told.

    ``task`` is what it was asked to do, and ``generation`` how; ``prompts_digest`` is that of
    ``model.prompts``. They are ``None`` or empty where it was asked for nothing.
    """

    name: str
    version: str
    model: str
    model_revision: str | None = None
    dtype: str | None = None
    options: dict[str, Primitive] = {}
    task: str | None = None
    generation: dict[str, Primitive] = {}
    prompts_digest: str | None = None
    load_s: float | None = None


class Record(StoredStruct, frozen=True):
    """One measured test: ``id`` is its node id, ``attempt`` counts reruns from 1.

    ``lease_wait_s`` is how long it waited for its devices, before anything was measured. ``boards`` tells of
    each leased GPU or MIG instance what it is, in the order of ``devices``. ``rank_peak_memory_bytes`` is the
    highest use of each rank in any round, in the order of ``ranks``. ``comparisons`` are with a baseline;
    ``failed_gate`` says that the test itself had passed and failed by its budget or by one of them.
    """

    id: str
    attempt: int
    status: Status
    reason: str | None = None
    params: dict[str, Primitive] = {}
    backend: BackendInfo | None = None
    parallel: Parallel = Parallel()
    ranks: list[RankInfo] = []
    rank_peak_memory_bytes: list[int | None] = []
    start_method: str | None = None
    launch: str | None = None
    start_s: float | None = None
    lease_wait_s: float | None = None
    devices: list[str] = []
    boards: list[Board] = []
    fallback: str | None = None
    load_average: float | None = None
    procedure: Procedure | None = None
    meters: list[MeterInfo] = []
    rounds: list[Round] = []
    power_trace: PowerTrace | None = None
    windows: list[Window] = []
    metrics: dict[str, Metric] = {}
    comparisons: list[Comparison] = []
    failed_gate: bool = False
    flags: list[Flag] = []

    @property
    def counts(self) -> bool:
        """Whether its figures are those of a test that did what it should."""
        return self.status == "measured" or self.failed_gate

    @property
    def kind(self) -> EnergyKind | None:
        """``measured`` or ``estimated``; ``None`` where nothing was read."""
        kinds = {meter.kind for meter in self.meters}
        if not kinds:
            return None
        return "estimated" if "estimated" in kinds else "measured"
