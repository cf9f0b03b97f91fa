# SPDX-License-Identifier: Apache-2.0
"""Build the record of a test from its draft when it ends, and hand it to the controller at once.

So nothing that ends a worker or the run later loses a record: a crash, Ctrl-C, a plugin that delays reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.plugin.draft import DRAFT, NOTHING_MEASURED, Draft, draft_of
from pytest_llenergy.plugin.interruption import hold_interrupts
from pytest_llenergy.plugin.plan import record_params, source_digest
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.xdist import BEGIN, RECORD, worker_input_of
from pytest_llenergy.record.base import Status
from pytest_llenergy.record.entry_points import locate_error
from pytest_llenergy.record.record import (
    Flag,
    MeterInfo,
    Parallel,
    Record,
    domain_kind,
    flag_kind,
    kind_of_energy,
    without_host,
)
from pytest_llenergy.record.text import escape_invisible, escape_surrogates, one_line, shorten

if TYPE_CHECKING:
    from pytest_llenergy.compare.gate import Gate

#: Longest reason of a record (characters): the text of an assertion may have megabytes.
MAX_REASON_LENGTH = 1000

RECORD_HOOK = "the hook pytest_llenergy_record"

#: Prefix of the properties that JUnit XML shows.
PROPERTY = "llenergy."


def announce(item: pytest.Item) -> None:
    """Tell the controller that a measuring test begins, so that it can record a crash of this worker."""
    worker_input_of(item.config).send(BEGIN, [item.nodeid, attempt_number(item)])


def start_record(item: pytest.Item) -> None:
    """Start the record of a measuring test, and discard data of an earlier attempt."""
    announce(item)
    if DRAFT in item.stash:
        del item.stash[DRAFT]
    item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith(PROPERTY)]


def attempt_number(item: pytest.Item) -> int:
    """Return the number of this attempt from 1, as counted by plugins that rerun tests."""
    return getattr(item, "execution_count", 1)


def build_record(item: pytest.Item, status: Status, reason: str | None) -> Record:
    """Build the record of a test from its draft; ``reason`` is why it was not measured, or did not pass."""
    draft = draft_of(item)
    experiment = draft.experiment
    # ``llenergy ab`` compares the rounds of an invalid record, too.
    if experiment is None and status not in ("measured", "invalid") and not draft.failed_gate:
        experiment = draft.unfinished
    windows = [window.record for window in draft.windows if window.ended]
    meters = [_with_exclusive(meter, draft) for meter in (experiment.meters if experiment else draft.meters)]
    return Record(
        id=item.nodeid,
        attempt=attempt_number(item),
        status=status,
        reason=reason,
        params=record_params(item),
        source_digest=source_digest(item),
        extra_info=json_values(draft.extra_info)[0],
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
        gpu_settings=list(draft.settings),
        fallback=draft.fallback,
        load_average=experiment.load_average if experiment else None,
        procedure=experiment.procedure if experiment else None,
        times=experiment.times if experiment else None,
        meters=meters,
        rounds=experiment.rounds if experiment else [],
        windows=windows,
        metrics={**(experiment.metrics if experiment else {}), **draft.metrics},
        custom={name: each for name, (_, each) in draft.custom.items()},
        outputs=list(draft.outputs),
        load_curve=draft.load_curve,
        comparisons=list(draft.comparisons),
        failed_gate=draft.failed_gate,
        flags=_flags(experiment, meters, draft.flags),
    )


def json_values(info: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Copy values as JSON has them: tuples become lists, keys text.

    Returns:
        The values that JSON can hold, and why the first other cannot be held, if there is one.
    """
    values: dict[str, Any] = {}
    refusal = None
    for name, value in list(info.items()):
        try:
            values |= json.loads(json.dumps({name: value}, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            refusal = refusal or f"extra_info[{name!r}] cannot be stored as JSON: {error}"
    return values, refusal


def check_extra_info(item: pytest.Item) -> None:
    """Raise ``LLEnergyError`` if a test wrote a value into ``extra_info`` that JSON cannot hold."""
    refusal = json_values(draft_of(item).extra_info)[1]
    if refusal is not None:
        raise LLEnergyError(one_line(refusal))


def check_gates(item: pytest.Item, gate: Gate | None) -> None:
    """Check a test whose body has passed against its budget and its baseline.

    Called in the call phase, so that xfail, ``-x``, ``--lf`` and reruns treat a broken gate like any other
    failure.

    Raises:
        pytest.fail.Exception: The test measured nothing, or breaks a gate.
    """
    draft = draft_of(item)
    # unittest stores failures on the item instead of raising them.
    if draft.failed_subtests or getattr(item, "_excinfo", None):
        return
    if draft.experiment is None and not draft.windows and draft.unmeasured is None:
        pytest.fail(NOTHING_MEASURED, pytrace=False)
    failures = [*_check_budget(draft, gate), *_check_baseline(item, draft, gate)]
    if failures:
        draft.failed_gate = True
        # Reasons name what is in the baseline.
        pytest.fail("\n".join(map(escape_invisible, failures)), pytrace=False)


def _check_budget(draft: Draft, gate: Gate | None) -> list[str]:
    if gate is None or gate.budget is None:
        return []
    metrics = draft.experiment.metrics if draft.experiment is not None else {}
    meters = draft.experiment.meters if draft.experiment is not None else []
    over = gate.budget.check(metrics, estimated=any(meter.kind == "estimated" for meter in meters))
    return [over] if over is not None else []


def _check_baseline(item: pytest.Item, draft: Draft, gate: Gate | None) -> list[str]:
    """Compare a test with its baseline; return a line for each broken threshold."""
    settings = settings_of(item.config)
    if settings.compare is None and not settings.fail_on and (gate is None or gate.threshold is None):
        return []
    from pytest_llenergy.compare.gate import list_failures
    from pytest_llenergy.plugin.gating import gating_of

    record = build_record(item, *draft.status_if_passed())
    hosts = draft.gang.environments if draft.gang is not None else {}
    draft.comparisons = gating_of(item.config).compare(record, gate, hosts)
    for each in draft.comparisons:
        item.user_properties.append((f"{PROPERTY}{each.metric}.verdict", each.verdict))
        if each.ratio is not None:
            item.user_properties.append((f"{PROPERTY}{each.metric}.ratio", each.ratio))
    return list_failures(draft.comparisons, settings.inconclusive)


def add_junit_properties(item: pytest.Item) -> None:
    """Add measured values to the properties of a test, for JUnit XML, even if its body failed."""
    draft = draft_of(item)
    experiment = draft.experiment
    properties: dict[str, object] = {}
    for name, metric in draft.metrics.items():
        properties[name] = metric.value
        properties[f"{name}.uncertainty"] = metric.uncertainty
        properties[f"{name}.uncertainty_absolute"] = metric.uncertainty_absolute
    windows = [each.record for each in draft.windows if each.ended]
    for window in windows:
        properties[f"window.{window.name}.energy_j"] = window.energy_j
        properties[f"window.{window.name}.energy_j.uncertainty_absolute"] = window.energy_u_absolute_j
    meters = experiment.meters if experiment is not None else draft.meters
    properties["kind"] = kind_of_energy(meters, experiment.rounds if experiment is not None else windows)
    properties["meter"] = ",".join(dict.fromkeys(meter.name for meter in meters)) or None
    properties["backend"] = draft.backend.name if draft.backend is not None else None
    properties["model"] = draft.backend.model if draft.backend is not None else None
    flags = _flags(experiment, meters, draft.flags)
    properties["flags"] = ",".join(dict.fromkeys(flag.name for flag in flags)) or None
    # Before the verdicts, which gates have added. pytest does not escape characters that XML cannot hold.
    item.user_properties[:0] = [
        (escape_invisible(f"{PROPERTY}{name}"), escape_invisible(value) if isinstance(value, str) else value)
        for name, value in properties.items()
        if value is not None
    ]


def count_failed_subtest(item: pytest.Item, report: pytest.TestReport) -> None:
    """Count a failed subtest. A record describes the whole test, which fails if any subtest fails."""
    draft_of(item).failed_subtests += report.failed


def deliver_record(item: pytest.Item, report: pytest.TestReport, *, with_hook: bool = True) -> None:
    """Build the record of a test after the phase that decides its outcome, and keep it.

    Without ``with_hook``, hooks do not change it: Ctrl-C or an error has ended one.
    """
    draft = draft_of(item)
    decides = report.when == "call" or (report.when == "setup" and not report.passed)
    if draft.delivered or not decides:
        return
    record = build_record(item, *_status(draft, report))
    if with_hook:
        try:
            record = item.ihook.pytest_llenergy_record(item=item, record=record) or record
        except Exception as error:  # code of the user, which must not cost the other tests
            report.outcome, report.longrepr = "failed", f"{RECORD_HOOK} raised {locate_error(error)}"
            record = build_record(item, *_status(draft, report))
    hosts = escape_surrogates(msgspec.to_builtins(draft.gang.environments)) if draft.gang is not None else {}
    # Other plugins, such as pytest-reportlog, find it there.
    built = report.__dict__["llenergy"] = to_primitives(record)
    controller = item.config.pluginmanager.get_plugin("llenergy-controller")
    with hold_interrupts():
        if controller is not None:
            controller.add_record(built, hosts)
        else:
            worker_input_of(item.config).send(RECORD, [built, hosts])
        draft.delivered = True


def deliver_unfinished(item: pytest.Item) -> None:
    """Keep the record of a test that Ctrl-C ended while it measured: what it has took long."""
    draft = draft_of(item)
    if draft.load_curve is not None:
        when = "before all loads were measured"
    elif draft.experiment is not None:
        when = "after it was measured"
    elif draft.unfinished is not None:
        when = "before all rounds were measured"
    elif any(window.ended for window in draft.windows):
        when = "before all windows were measured"
    else:
        return
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"interrupted {when}",
        when="call",
    )
    deliver_record(item, report, with_hook=False)


def to_primitives(record: Record) -> dict[str, Any]:
    """Convert a record to JSON primitives, the only values that pytest-xdist can send with a report."""
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
    if draft.failed_subtests:
        return "failed", f"{draft.failed_subtests} failed subtest{'s' if draft.failed_subtests > 1 else ''}"
    return draft.status_if_passed()


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr).strip()
    return shorten(text.partition("\n")[0], MAX_REASON_LENGTH) if text else "failed"


def _skip_reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return shorten(text.removeprefix("Skipped: "), MAX_REASON_LENGTH)


def _with_exclusive(meter: MeterInfo, draft: Draft) -> MeterInfo:
    """Set whether the test had everything that the meter reads to itself."""
    device = without_host(meter.domain).partition(":")[2]
    devices = draft.lease.devices if draft.lease is not None else ()
    exclusive = device in devices if domain_kind(meter.domain) == "gpu" else draft.host_exclusive
    return msgspec.structs.replace(meter, exclusive=exclusive)


def _flags(experiment: Experiment | None, meters: Sequence[MeterInfo], before: Sequence[Flag]) -> list[Flag]:
    """Return the flags of the rounds, each kind once with its number of rounds, and those in ``before``."""
    rounds = experiment.rounds if experiment is not None else []
    by_kind: dict[tuple[str, str, str], list[Flag]] = {}
    for round_ in rounds:
        for kind, flag in {flag_kind(flag): flag for flag in reversed(round_.flags)}.items():
            by_kind.setdefault(kind, []).append(flag)
    flags = [
        msgspec.structs.replace(same[0], detail=f"{len(same)} of {len(rounds)} rounds: {same[0].detail}")
        for same in by_kind.values()
    ]
    flags += experiment.flags if experiment is not None else []
    flags += [flag for flag in before if flag_kind(flag) not in by_kind]
    estimated = [meter for meter in meters if meter.kind == "estimated"]
    if estimated:
        detail = f"{estimated[0].source}; {estimated[0].accuracy}"
        flags.insert(0, Flag(name="estimated", severity="note", detail=detail))
    return flags
