# SPDX-License-Identifier: Apache-2.0
"""From a test as it runs to its record: pieces are noted while it runs, joined when its phase ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_llenergy import marks
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.meters.window import Window
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.record import (
    BackendInfo,
    Flag,
    MeterInfo,
    Metric,
    Parallel,
    RankInfo,
    Record,
    Status,
)
from pytest_llenergy.model.text import escape_invisible, escape_surrogates
from pytest_llenergy.options import settings_of
from pytest_llenergy.plan import read_mark
from pytest_llenergy.xdist import errand_of, record_id

if TYPE_CHECKING:
    from pytest_llenergy.compare.gate import Gate

NOTHING_MEASURED = "the test asks for energy and has measured nothing; call energy(...), or drop the fixture"

LEASE_LOST = Flag(
    name="lease-lost",
    severity="warning",
    detail="a lock file of the test's devices was removed while it ran; others may have used them meanwhile",
)

#: What the names of our properties begin with.
PROPERTY = "llenergy."

#: Parameters are kept as they are up to this many characters of their text.
PARAM_LENGTH = 200


@dataclass
class Draft:
    """What is known of a test so far."""

    asked: GpuRequest | None = None
    lease: Lease | None = None
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
    lease_intact: Callable[[], bool] = bool
    flags: list[Flag] = field(default_factory=list)
    experiment: Experiment | None = None
    windows: list[Window] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    failed_gate: bool = False
    failed_parts: int = 0
    #: Set for a test that is measured beside what it is for: why it is not, where it is not. No failure.
    unmeasured: str | None = None
    #: Whether what is measured runs in this process, on whatever devices that may use.
    runs_here: bool = False

    @property
    def wants_ranks(self) -> bool:
        """Whether its functions run in ranks: those of a test that asks for devices."""
        return self.asked is not None

    def forget_ranks(self) -> None:
        """What is measured now runs in pytest's process, whatever else the test has run before."""
        self.parallel = self.backend = self.launch = self.start_method = self.start_s = None
        self.ranks = ()


DRAFT = pytest.StashKey[Draft]()


def draft_of(item: pytest.Item) -> Draft:
    """The draft of a test, made on first use."""
    return item.stash.setdefault(DRAFT, Draft())


def announce(item: pytest.Item) -> None:
    """Tell a controller that a test measures, so that it knows what is lost when this worker dies."""
    errand_of(item.config).tell_begin(item.nodeid, attempt_of(item))


def begin(item: pytest.Item) -> None:
    """A test that measures begins: forget what an earlier attempt left."""
    announce(item)
    if DRAFT in item.stash:
        del item.stash[DRAFT]
    item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith(PROPERTY)]


def attempt_of(item: pytest.Item) -> int:
    """Which one it is at: plugins that run a test again count them so."""
    return getattr(item, "execution_count", 1)


def finish(item: pytest.Item, report: pytest.TestReport) -> Record:
    """The record of a test whose phase has ended for good."""
    return _record(item, *_status(draft_of(item), report))


def _record(item: pytest.Item, status: Status, reason: str | None) -> Record:
    draft, errand = draft_of(item), errand_of(item.config)
    experiment = draft.experiment
    windows = [window.record for window in draft.windows if window.ended]
    if draft.lease is not None and not draft.lease_intact() and LEASE_LOST not in draft.flags:
        draft.flags.append(LEASE_LOST)
    meters = [_owned(meter, draft) for meter in (experiment.meters if experiment else draft.meters)]
    return Record(
        id=record_id(item.nodeid, label=errand.label, grouped=errand.grouped),
        attempt=attempt_of(item),
        status=status,
        reason=reason,
        params=_params(item),
        backend=draft.backend,
        parallel=draft.parallel or Parallel(),
        ranks=list(draft.ranks),
        rank_peak_memory_bytes=list(draft.rank_peak_memory_bytes),
        start_method=draft.start_method,
        launch=draft.launch,
        start_s=draft.start_s,
        lease_wait_s=draft.lease_wait_s,
        devices=list(draft.lease.devices) if draft.lease else [],
        boards=list(draft.lease.boards) if draft.lease else [],
        fallback=draft.fallback,
        load_average=experiment.load_average if experiment else None,
        procedure=experiment.procedure if experiment else None,
        meters=meters,
        rounds=experiment.rounds if experiment else [],
        power_trace=experiment.power_trace if experiment else None,
        windows=windows,
        metrics=experiment.metrics if experiment else {},
        comparisons=list(draft.comparisons),
        failed_gate=draft.failed_gate,
        flags=[*_flags(experiment, meters, draft.flags), *errand.flags],
    )


def judge(item: pytest.Item) -> None:
    """Once the body of a test has passed: its budget and its baseline.

    Fails the test in its call phase, so that xfail, ``-x``, ``--lf`` and reruns treat it like any other
    failure.
    """
    draft = draft_of(item)
    # unittest notes what went wrong on the test, and raises nothing.
    if draft.failed_parts or getattr(item, "_excinfo", None):
        return
    experiment = draft.experiment
    if experiment is None and not draft.windows and draft.unmeasured is None:
        pytest.fail(NOTHING_MEASURED, pytrace=False)
    metrics = experiment.metrics if experiment is not None else {}
    failed = _gates_failed(item, draft, metrics)
    if failed:
        draft.failed_gate = True
        pytest.fail("\n".join(failed), pytrace=False)


def tell_junit(item: pytest.Item) -> None:
    """What was measured as properties of the test, which JUnit XML shows, also where its body has failed."""
    draft = draft_of(item)
    experiment = draft.experiment
    told: dict[str, object] = {}
    for name, metric in experiment.metrics.items() if experiment is not None else ():
        told[name] = metric.value
        told[f"{name}.uncertainty"] = metric.uncertainty
        told[f"{name}.uncertainty_absolute"] = metric.uncertainty_absolute
    for window in (each.record for each in draft.windows if each.ended):
        told[f"window.{window.name}.energy_j"] = window.energy_j
        told[f"window.{window.name}.energy_j.uncertainty_absolute"] = window.energy_u_absolute_j
    meters = experiment.meters if experiment is not None else draft.meters
    told["kind"] = ",".join(sorted({meter.kind for meter in meters})) or None
    told["meter"] = ",".join(dict.fromkeys(meter.name for meter in meters)) or None
    told["backend"] = draft.backend.name if draft.backend is not None else None
    told["model"] = draft.backend.model if draft.backend is not None else None
    flags = _flags(experiment, meters, draft.flags)
    told["flags"] = ",".join(dict.fromkeys(flag.name for flag in flags)) or None
    # Before what gates have added. pytest writes names as they are, and XML has no place for some characters.
    item.user_properties[:0] = [
        (escape_invisible(f"{PROPERTY}{name}"), escape_invisible(value) if isinstance(value, str) else value)
        for name, value in told.items()
        if value is not None
    ]


def _gates_failed(item: pytest.Item, draft: Draft, metrics: Mapping[str, Metric]) -> list[str]:
    """A line for each gate that was not passed."""
    gate: Gate | None = read_mark(item, marks.energy_gate)
    settings = settings_of(item.config)
    failed: list[str] = []
    if gate is not None and gate.budget is not None:
        meters = draft.experiment.meters if draft.experiment is not None else []
        estimated = any(meter.kind == "estimated" for meter in meters)
        over = gate.budget.judge(metrics, estimated=estimated)
        failed += [over] if over is not None else []
    if settings.compare is None and not settings.fail_on and (gate is None or gate.threshold is None):
        return failed
    from pytest_llenergy.compare.gate import list_failures
    from pytest_llenergy.gating import gating_of

    draft.comparisons = gating_of(item.config).compared(_record(item, *_outcome(draft)), gate)
    for each in draft.comparisons:
        item.user_properties.append((f"{PROPERTY}{each.metric}.verdict", each.verdict))
        if each.ratio is not None:
            item.user_properties.append((f"{PROPERTY}{each.metric}.ratio", each.ratio))
    return failed + list_failures(draft.comparisons, settings.inconclusive)


def note_part(item: pytest.Item, report: pytest.TestReport) -> None:
    """A subtest has ended. The record is of the test as a whole, which has failed if one of them has."""
    draft_of(item).failed_parts += report.failed


def attach(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put the record on the report of the phase that decides the test.

    A report is what xdist carries to the controller as it happens, so a worker that dies later takes no
    finished record with it.
    """
    if report.when == "call" or (report.when == "setup" and not report.passed):
        record = finish(item, report)
        replaced = item.ihook.pytest_llenergy_record(item=item, record=record)
        vars(report)["llenergy"] = to_primitives(replaced or record)


def attach_crash(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put a record on the one report there is of a test whose process has died."""
    lines = str(report.longrepr).strip().splitlines()
    vars(report)["llenergy"] = to_primitives(
        _record(item, "crashed", lines[0] if lines else "its process died")
    )


def to_primitives(record: Record) -> dict[str, Any]:
    """A record as JSON primitives: the only thing that may travel on a test report under xdist."""
    built = msgspec.to_builtins(record)
    cleaned = escape_surrogates(built)
    assert isinstance(cleaned, dict)
    return cleaned


def _status(draft: Draft, report: pytest.TestReport) -> tuple[Status, str | None]:
    expected = getattr(report, "wasxfail", None)
    if expected is not None and report.skipped:
        return "failed", f"xfail: {expected}".removesuffix(": ")
    if report.failed:
        return "failed", _first_line(report)
    if report.skipped:
        return "skipped", _skip_reason(report)
    if draft.failed_parts:
        return "failed", f"{draft.failed_parts} failed subtest{'s' if draft.failed_parts > 1 else ''}"
    return _outcome(draft)


def _outcome(draft: Draft) -> tuple[Status, str | None]:
    """Of a test whose body has passed."""
    if draft.experiment is not None:
        energy = draft.experiment.metrics["energy_j"]
        return ("measured", None) if energy.value is not None else ("invalid", energy.reason)
    windows = [window.record for window in draft.windows if window.ended]
    if windows:
        missing = [window.reason for window in windows if window.energy_j is None]
        return ("invalid", missing[0]) if missing else ("measured", None)
    return "invalid", draft.unmeasured or NOTHING_MEASURED


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr).strip()
    return text.splitlines()[0] if text else "failed"


def _skip_reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def _params(item: pytest.Item) -> dict[str, Primitive]:
    callspec = getattr(item, "callspec", None)
    values: Mapping[str, Any] = callspec.params if callspec is not None else {}
    return {name.removeprefix("_llenergy_"): _primitive(value) for name, value in values.items()}


def _primitive(value: Any) -> Primitive:
    if value is None or type(value) in (bool, int, float, str):
        return value[:PARAM_LENGTH] if isinstance(value, str) else value
    # A repr with an address would make equal parameters differ from run to run.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text[:PARAM_LENGTH]


def _owned(meter: MeterInfo, draft: Draft) -> MeterInfo:
    """With whether the test had to itself what the meter reads."""
    kind, _, device = meter.domain.partition(":")
    devices = draft.lease.devices if draft.lease is not None else ()
    exclusive = device in devices if kind == "gpu" else draft.host_exclusive
    return msgspec.structs.replace(meter, exclusive=exclusive)


def _flags(experiment: Experiment | None, meters: Sequence[MeterInfo], before: Sequence[Flag]) -> list[Flag]:
    """Flags from ``before``, and of the rounds, each name once with the number of rounds that have it."""
    rounds = experiment.rounds if experiment is not None else []
    seen: dict[str, list[Flag]] = {}
    for round_ in rounds:
        # Two boards may raise the same flag in one round.
        for flag in {flag.name: flag for flag in reversed(round_.flags)}.values():
            seen.setdefault(flag.name, []).append(flag)
    total = len(rounds)
    flags = [
        Flag(
            name=name, severity=found[0].severity, detail=f"{len(found)} of {total} rounds: {found[0].detail}"
        )
        for name, found in seen.items()
    ]
    flags += experiment.flags if experiment is not None else []
    flags += [flag for flag in before if flag.name not in seen]
    estimated = [meter for meter in meters if meter.kind == "estimated"]
    if estimated:
        detail = f"{estimated[0].source}; {estimated[0].accuracy}"
        flags.insert(0, Flag(name="estimated", severity="note", detail=detail))
    return flags
