# SPDX-License-Identifier: Apache-2.0
"""One measured test: JSON primitives only, with units in the names.

A missing value is ``None``, with the reason in a separate field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from pytest_llenergy.record.base import Count, Direction, EnergyKind, Number, Primitive, Status, StoredStruct
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.load_curve import LoadCurve, MaxLoad
from pytest_llenergy.record.quantity import format_energy, format_quantity
from pytest_llenergy.record.served import RequestEnergies, ServedRequests

Severity = Literal["note", "warning", "invalid"]

#: Host of ranks on the host of pytest itself, in place of its name in a cluster.
LOCALHOST = "localhost"

#: Joules of a test are attributed if they are so in this share of its rounds.
ATTRIBUTED_SHARE = 0.5


class Flag(StoredStruct, frozen=True):
    """A fact that readers of a number must know. With the severity ``invalid`` the number is not a result."""

    name: str
    severity: Severity
    detail: str


#: Flags with several causes, which only their details tell apart.
SEVERAL_CAUSES = frozenset(
    {
        "contended",
        "doubtful",
        "gpu-processes",
        "host",
        "imprecise",
        "late-request",
        "meter",
        "prefix-cache",
        "uneven-rounds",
        "unmeasured",
    }
)


def flag_kind(flag: Flag) -> tuple[str, str, str]:
    """Return what flags of the same cause have in common: also words that are no value, device or process."""
    words = re.sub(r"\(.*?\)|\S*[\d:/]\S*", "", flag.detail) if flag.name in SEVERAL_CAUSES else ""
    return flag.name, flag.severity, words


class Metric(StoredStruct, frozen=True):
    """One value of a test.

    Attributes:
        uncertainty: Standard uncertainty (k = 1) for comparing runs on the same devices. Twice as much covers
            95 %, for few rounds as well.
        spread: Part of ``uncertainty`` that comes from the scatter of the rounds.
        uncertainty_absolute: ``uncertainty`` plus what all runs have in common, such as the gain of the meter
            or the model of an estimate.
        n: Number of rounds; of a percentile, that of the requests or gaps that it is taken over.
        rounds: Number of rounds if ``n`` is another; the uncertainty comes from these.
        source: Where a value that does not come from rounds was obtained.
    """

    value: Number | None
    unit: str
    uncertainty: Number | None = None
    spread: Number | None = None
    uncertainty_absolute: Number | None = None
    n: Count = 0
    rounds: Count | None = None
    reason: str | None = None
    source: str | None = None


class CustomMetric(StoredStruct, frozen=True):
    """What a metric that a test or a hook has added needs beside its value in ``metrics``.

    Attributes:
        better: Direction that is better.
        values: Values of single rounds or items, whose mean is the value; empty if only the mean is known.
    """

    better: Direction
    values: list[Number] = []


class Terms(StoredStruct, frozen=True):
    """The uncertainty of an energy by cause, as standard uncertainties in joules.

    Attributes:
        edges_j: When the counter ticked, and the course of power between ticks at the edges of the window.
        outside_j: Power outside the window, between its edges and the nearest ticks.
        resolution_j: Steps of the counter.
        coverage_j: Energy that a part-time sensor did not see.
        attribution_j: CPU times and idle power by which the joules of a busy host are split.
        shape_j: The course of power between ticks. Windows, iterations and boards of the same work share it,
            so that it adds up linearly.
        clock_j: The offset between the clock of another host and that of pytest, which marks the edges of the
            window. Domains, phases and rounds of a host share it, so that it adds up linearly there. The part
            from the clock of the host that marked the edges adds up linearly over hosts too.
    """

    edges_j: Number
    outside_j: Number
    resolution_j: Number
    coverage_j: Number
    attribution_j: Number = 0.0
    shape_j: Number = 0.0
    clock_j: Number = 0.0


class DomainEnergy(StoredStruct, frozen=True):
    """Energy of one domain (``gpu:GPU-…``, ``cpu:package-0``, ``cpu:processes``) in one window.

    In a test on hosts of a cluster its name begins with that of its host: ``host/gpu:GPU-…``.

    ``low_j`` and ``high_j`` are the limits that the accuracy of the source sets on the true value. If the
    energy is ``attributed``, they contain the error of its split by CPU time too, and ``whole_j`` is the
    energy of the whole domain.
    """

    energy_j: Number | None
    energy_u_j: Number | None
    kind: EnergyKind
    terms: Terms | None = None
    low_j: Number | None = None
    high_j: Number | None = None
    whole_j: Number | None = None
    reason: str | None = None

    @property
    def width_j(self) -> float:
        """Width (J) of the limits, also where the lower one is cut at zero, so that they are uneven."""
        low_j, high_j = self.low_j or 0.0, self.high_j or 0.0
        return max(high_j - low_j, 0.0 if low_j > 0 else 2 * (high_j - (self.energy_j or 0.0)))


def without_host(domain: str) -> str:
    """Return the name of a domain on its own host: ``gpu:GPU-…`` for ``host/gpu:GPU-…``."""
    kind, colon, device = domain.partition(":")
    return kind.rpartition("/")[2] + colon + device


def host_of(domain: str) -> str:
    """Return the host of a domain: ``host`` for ``host/gpu:GPU-…``, "" for one of pytest's own host."""
    return domain.partition(":")[0].rpartition("/")[0]


def domain_kind(domain: str) -> str:
    """Return what kind of hardware a domain is, such as ``gpu``."""
    return without_host(domain).partition(":")[0]


class Phase(StoredStruct, frozen=True):
    """A part of a round, summed over its iterations. Phases follow one another and fill the round.

    ``output_tokens`` were produced in the phase; they are known for the phases of a served load.
    """

    name: str
    duration_s: Number
    energy_j: Number | None
    energy_u_j: Number | None
    terms: Terms | None = None
    reason: str | None = None
    output_tokens: Count | None = None


class Tokens(StoredStruct, frozen=True, omit_defaults=True):
    """Token counts summed over requests: prompts without padding, outputs as produced.

    Attributes:
        drafted: Tokens that speculative decoding proposed; None without it.
        accepted: Drafted tokens that the model has confirmed; part of ``output``.
        cached: Prompt tokens taken from a prefix cache that the test allows; None without one.
    """

    input: Count
    output: Count
    drafted: Count | None = None
    accepted: Count | None = None
    cached: Count | None = None


class Round(StoredStruct, frozen=True):
    """``iterations`` calls of the work back to back. Energy, time, tokens and requests are of all calls.

    Attributes:
        energy_u_j: Standard uncertainty for comparing on the same devices, split by cause in ``terms``.
        energy_u_absolute_j: ``energy_u_j`` plus the accuracy of the sources.
        phase: Where in a tick of the slowest counter the round started, from 0 to 1.
        idle_power_w: Power in the quiet gaps around the round, with the context alive.
        own_cpu_s: CPU time of the test's processes.
        other_cpu_s: CPU time of other processes.
        stolen_cpu_s: CPU time that the hypervisor gave to other guests although this one wanted it.
        max_load: Result of the search for the maximum load that ended with these rounds.
        session: Number of the session of ``llenergy ab``, over both sides; None outside of it.
    """

    start_s: Number
    duration_s: Number
    energy_j: Number | None
    energy_u_j: Number | None
    energy_u_absolute_j: Number | None
    iterations: Annotated[int, msgspec.Meta(ge=1, le=10**15)] = 1
    phase: Number | None = None
    terms: Terms | None = None
    idle_power_w: Number | None = None
    idle_power_u_w: Number | None = None
    by_domain: dict[str, DomainEnergy] = {}
    phases: list[Phase] = []
    tokens: Tokens | None = None
    requests: Count | None = None
    time_to_first_token_s: Number | None = None
    inter_token_latency_s: Number | None = None
    served: ServedRequests | None = None
    request_energies: RequestEnergies | None = None
    max_load: MaxLoad | None = None
    temperature_start_c: Number | None = None
    own_cpu_s: Number | None = None
    other_cpu_s: Number | None = None
    stolen_cpu_s: Number | None = None
    flags: list[Flag] = []
    reason: str | None = None
    session: Count | None = None

    def __repr__(self) -> str:
        calls, energy, each = f"{self.iterations} calls", f"no energy ({self.reason})", ""
        if self.energy_j is not None:
            energy = format_quantity(self.energy_j, self.energy_u_absolute_j, "J")
            each = f" ({format_energy(self.energy_j / self.iterations)} per call)"
        if self.iterations == 1:
            calls, each = "1 call", ""
        return f"<Round of {calls}: {energy} in {self.duration_s:.3g} s{each}>"


class WindowRecord(StoredStruct, frozen=True):
    """One named window of the ``energy_meter`` fixture. Times are monotonic seconds."""

    name: str
    start_s: float
    duration_s: float
    energy_j: float | None
    energy_u_j: float | None
    energy_u_absolute_j: float | None
    by_domain: dict[str, DomainEnergy]
    own_cpu_s: float | None = None
    other_cpu_s: float | None = None
    flags: list[Flag] = []
    reason: str | None = None


class MeterInfo(StoredStruct, frozen=True):
    """One domain that was read, and how.

    Attributes:
        resolution_j: Smallest step of the counter.
        coverage: Share of the time in which the sensor samples.
        exclusive: Whether the test had leased everything that the meter reads.
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

    Attributes:
        settled: Whether the warm-up met ``criterion`` before its cap; None if its length was given.
        iterations: Iterations per round, given or chosen so that the uncertainty of a round meets ``target``.
        target: Relative standard uncertainty of ``energy_j`` to reach.
        budget_s: Time, warm-up included, after which no round started; 0 if their number was given.
        measuring_s: Time of the rounds with their quiet gaps.
        reached: Relative standard uncertainty that was reached.
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


class Times(StoredStruct, frozen=True):
    """Where the time of a measurement went, in seconds.

    Attributes:
        load_s: Starting ranks, loading the model and preparing the inputs.
        warmup_s: Warm-up and calibration, with the wait for the first readings of the meters.
        rounds_s: The measured work of all rounds.
        gaps_s: Quiet gaps, and what else happens between rounds.
        other_loads_s: Loads at other rates that the test measured too.
    """

    load_s: float = 0.0
    warmup_s: float = 0.0
    rounds_s: float = 0.0
    gaps_s: float = 0.0
    other_loads_s: float = 0.0


class Coordinates(StoredStruct, frozen=True):
    """The part of the work that a process has, each counted from 0.

    Attributes:
        data: Its replica of the model.
        tensor: Its shard of each layer.
        pipeline: Its stage, a stretch of layers.
    """

    data: int
    tensor: int
    pipeline: int


class RankInfo(StoredStruct, frozen=True):
    """One worker process as observed, not as planned.

    ``host`` is ``localhost`` for the host of pytest. ``workers`` are the pids of processes that the backend
    in this rank started itself, and ``worker_coordinates`` the part of each. ``coordinates`` is None for a
    rank whose backend divides the model among them.
    """

    rank: int
    local_rank: int
    pid: int
    device: str
    threads: int | None = None
    cpus: list[int] | None = None
    host: str = LOCALHOST
    workers: list[int] = []
    coordinates: Coordinates | None = None
    worker_coordinates: list[Coordinates] = []


class BoardSettings(StoredStruct, frozen=True):
    """Settings of one board during a test: as its mark ``gpu_settings`` asks, and as the driver reported.

    Attributes:
        graphics_clock_mhz: The lowest and the highest clock that it may have.
        power_limit_found_w: The limit that the driver reported after the change.
        graphics_clock_found_mhz: The clock that the driver reported after the change.
    """

    uuid: str
    power_limit_w: Number | None = None
    graphics_clock_mhz: list[int] | None = None
    power_limit_found_w: Number | None = None
    graphics_clock_found_mhz: int | None = None


class Parallel(StoredStruct, frozen=True):
    """Parallel degrees. Their product is the number of devices.

    ``placement`` is the number of devices over which one process spreads the layers of a model. They work in
    turn.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    placement: int = 1


class Precision(StoredStruct, frozen=True):
    """Number types that a backend executes with, as read from the loaded engine. None: it does not report it.

    Several types are joined by commas, those of most parameters first; types of less than 1 % are left out.

    Attributes:
        weights: Types of the stored weights, such as ``float32`` or ``q4_1, q8_0``.
        compute: Type of the arithmetic of weights that are not quantised, and of attention.
        kv_cache: Types of keys and values.
    """

    weights: str | None = None
    compute: str | None = None
    kv_cache: str | None = None


class BackendInfo(StoredStruct, frozen=True):
    """The backend that ran, and its settings.

    ``task`` is its task and ``generation`` the task's parameters; ``prompts_digest`` comes from
    ``record.outputs.digest_prompts``. They are None or empty for other work. ``precision`` is None in reports
    of versions that did not record it.
    """

    name: str
    version: str
    model: str
    model_revision: str | None = None
    dtype: str | None = None
    precision: Precision | None = None
    options: dict[str, Primitive] = {}
    task: str | None = None
    generation: dict[str, Primitive] = {}
    prompts_digest: str | None = None
    load_s: float | None = None


class Record(StoredStruct, frozen=True):
    """One measured test.

    Attributes:
        id: Node id of the test.
        attempt: Counts reruns, from 1.
        lease_wait_s: Time that the test waited for its devices, before measuring.
        boards: Each leased GPU or MIG instance, in the order of ``devices``, before ``gpu_settings``.
        rank_peak_memory_bytes: Highest use of each rank in any round, in the order of ``ranks``.
        load_curve: Loads at several rates; ``rounds`` and ``metrics`` are those of one of them.
        comparisons: Verdicts against a baseline.
        failed_gate: Whether the test passed and then failed by its budget or by a comparison.
        extra_info: What the test wrote into ``extra_info`` of its fixture, as JSON values.
        custom: The metrics that the test or a hook has added, by their names in ``metrics``.
        outputs: For each request of greedy work, a digest of each output token and all before it, as two
            hexadecimal digits. Equal beginnings have equal digits; without the prompts they reveal no text.
            Empty for other work, and where the backend does not report tokens.
        source_digest: Hash of the test function's code, without its name, comments and formatting. Null in
            reports of versions that did not record it, and without source code.
    """

    id: str
    attempt: int
    status: Status
    reason: str | None = None
    params: dict[str, Primitive] = {}
    source_digest: str | None = None
    extra_info: dict[str, Any] = {}
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
    gpu_settings: list[BoardSettings] = []
    fallback: str | None = None
    load_average: float | None = None
    procedure: Procedure | None = None
    times: Times | None = None
    meters: list[MeterInfo] = []
    rounds: list[Round] = []
    windows: list[WindowRecord] = []
    metrics: dict[str, Metric] = {}
    custom: dict[str, CustomMetric] = {}
    outputs: list[str] = []
    load_curve: LoadCurve | None = None
    comparisons: list[Comparison] = []
    failed_gate: bool = False
    flags: list[Flag] = []

    def value_of(self, metric: str) -> float | None:
        """Return the value of a metric, as every table, verdict and file shows it; None if it is missing."""
        found = self.metrics.get(metric)
        return found.value if found is not None else None

    @property
    def counts(self) -> bool:
        """Whether the test passed, apart from gates, so that its values can be used."""
        return self.status == "measured" or self.failed_gate

    @property
    def is_spoiled(self) -> bool:
        """Whether a flag makes all of the record invalid. Flags of rounds exclude only these rounds."""
        of_rounds = {flag.name for round_ in self.rounds for flag in round_.flags}
        return any(flag.severity == "invalid" and flag.name not in of_rounds for flag in self.flags)

    @property
    def kind(self) -> EnergyKind | None:
        """``measured``, ``estimated`` if any meter estimates, or None without meters.

        ``attributed`` if others used the host in half of the rounds or more, so that the joules of its CPUs
        were split by CPU time; without rounds, in half of the windows or more.
        """
        return kind_of_energy(self.meters, self.rounds or self.windows)


def kind_of_energy(meters: Sequence[MeterInfo], rounds: Sequence[Round | WindowRecord]) -> EnergyKind | None:
    """Return the kind of joules, from the meters and the flags of each round or window."""
    kinds = {meter.kind for meter in meters}
    if not kinds or "estimated" in kinds:
        return "estimated" if kinds else None
    split = sum(is_attributed(part) for part in rounds if part.flags)
    return "attributed" if split and split >= ATTRIBUTED_SHARE * len(rounds) else "measured"


def is_attributed(part: Round | WindowRecord) -> bool:
    """Return whether the joules of a round or window, or some of them, were split by CPU time."""
    return any(flag.name == "attributed" for flag in part.flags)
