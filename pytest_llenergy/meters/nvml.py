# SPDX-License-Identifier: Apache-2.0
"""NVIDIA boards: the energy counter that the driver keeps, or else its power reading, integrated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.devices.nvml import BoardHandle, Quantity, Session
from pytest_llenergy.errors import DeviceError, MeterDoesNotApply, MeterError
from pytest_llenergy.meters.checkcache import CheckCache, CheckedBoard, boot_id
from pytest_llenergy.meters.checkresult import CheckResult
from pytest_llenergy.meters.power import IntegratedPower
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets, within
from pytest_llenergy.meters.refresh import Refresh, refresh_seen
from pytest_llenergy.meters.sensors import SLOWEST_REFRESH_S, coverage, known_share
from pytest_llenergy.meters.sources import Sources, find_sources
from pytest_llenergy.model.record import Flag

if TYPE_CHECKING:
    from pytest_llenergy.meters.selfcheck import Poll

#: NVIDIA states an accuracy for Fermi and Kepler boards only (±5 %: nvml.h, nvmlDeviceGetPowerUsage).
#: Against external meters the power readings of 13 newer boards were off by -7.9 to +12.8 %, most of them
#: by about -5 % (Yang et al., "Part-time Power Measurements: nvidia-smi's Lack of Attention", SC 2024). As
#: limits of a rectangle ±10 % hold that in two standard uncertainties.
GAIN_LIMIT = 0.10

#: Counters and power readings are in mJ and mW.
STEP = 0.001

#: Seconds between readings, at most and at least; a tenth of the tick period in between. Power is integrated
#: as it comes, so that readings cannot be put off for what they cost.
SLOWEST_POLL_S = 0.01
FASTEST_POLL_S = 0.002
FASTEST_POWER_POLL_S = 0.005


class NvmlMeter:
    """One board, found by UUID: indices differ between CUDA and NVML. Each reading is one call.

    The session belongs to the meter from now on.
    """

    name = "nvml"

    def __init__(self, session: Session, sources: Sources, result: CheckResult) -> None:
        self._session = session
        self._uuid = sources.board.uuid
        self._handle = sources.board.handle
        self._integral: IntegratedPower | None = None
        if sources.counter is not None and result.reason is None:
            quantity = sources.counter
            domain = _counter_domain(sources, sources.counter, result)
        else:
            quantity = _power_to_integrate(sources, result)
            watched = result if quantity == sources.watched else None
            refresh = refresh_seen(watched, SLOWEST_REFRESH_S, known_share(sources.board.name))
            domain = _power_domain(sources, quantity, result, refresh)
            self._integral = refresh.integral()
        self.domains: Sequence[Domain] = (domain,)
        self.poll_period_s: float = _poll_period_s(domain)
        self._value = session.reader(self._handle, quantity)

    def read(self) -> list[float | str]:
        begin_s = time.monotonic()
        value = self._value()
        if isinstance(value, str):
            return [f"nvml: {value} ({self._uuid})"]
        if self._integral is None:
            return [value]
        return [self._integral.add((begin_s + time.monotonic()) / 2, value)]

    def close(self) -> None:
        self._session.close()


def _poll_period_s(domain: Domain) -> float:
    if domain.update_period_s is None or domain.max_age_s is not None:
        return SLOWEST_POLL_S
    fastest_s = FASTEST_POWER_POLL_S if domain.integrated else FASTEST_POLL_S
    return min(max(domain.update_period_s / 10, fastest_s), SLOWEST_POLL_S)


def _power_to_integrate(sources: Sources, result: CheckResult) -> Quantity:
    what = f"energy counter rejected: {result.reason}" if sources.counter else "no energy counter"
    if sources.power is None:
        raise MeterError(f"nvml: {sources.board.uuid}: {what}; the driver tells no power to integrate")
    if sources.power == sources.watched and result.mean_w == 0:
        raise MeterError(f"nvml: {sources.board.uuid}: {what}; {sources.power.label} says 0 W")
    return sources.power


def _counter_domain(sources: Sources, counter: Quantity, result: CheckResult) -> Domain:
    share, known_from = coverage(sources.board.name, result.period_s)
    return Domain(
        name=f"gpu:{sources.board.uuid}",
        kind="measured",
        source=counter.name,
        scope=counter.scope,
        resolution_j=STEP,
        accuracy=_accuracy(share, f"{known_from}, which the counter is assumed to share"),
        limits=within(GAIN_LIMIT),
        update_period_s=result.period_s,
        max_age_s=result.period_s if result.continuous else None,
        coverage=share,
        highest_w=_highest_w(sources, counter),
        flags=_flags(sources, counter, None),
    )


def _power_domain(sources: Sources, power: Quantity, result: CheckResult, refresh: Refresh) -> Domain:
    share, known_from = coverage(sources.board.name, refresh.period_s)
    return Domain(
        name=f"gpu:{sources.board.uuid}",
        kind="measured",
        source=f"{power.name} integrated",
        scope=power.scope,
        resolution_j=refresh.period_s * STEP,
        accuracy=_accuracy(share, known_from),
        limits=within(GAIN_LIMIT),
        update_period_s=refresh.period_s,
        max_age_s=refresh.max_age_s,
        smear_s=sources.smear_s(power),
        late_s=refresh.late_s,
        integrated=True,
        coverage=share,
        highest_w=_highest_w(sources, power),
        flags=(*_flags(sources, power, result.reason), *_unknown(sources, power, refresh)),
    )


def _unknown(sources: Sources, power: Quantity, refresh: Refresh) -> tuple[Flag, ...]:
    if refresh.known:
        return ()
    detail = (
        f"{sources.board.uuid}: {power.label} changed too seldom while it was checked to show when it is "
        f"refreshed; its joules may be told up to {refresh.late_s[1] * 1e3:.0f} ms late"
    )
    return (Flag(name="refresh-unknown", severity="warning", detail=detail),)


def _accuracy(share: float, about_sensor: str) -> str:
    return f"within {GAIN_LIMIT:.0%} of the reading" + (f"; {about_sensor}" if share < 1 else "")


def _highest_w(sources: Sources, quantity: Quantity) -> float | None:
    # The limit is the GPU's; CPU and memory of a module come on top.
    return sources.limit_w if quantity.scope == "board" else None


def _flags(sources: Sources, quantity: Quantity, rejected: str | None) -> tuple[Flag, ...]:
    uuid = sources.board.uuid
    flags = []
    if quantity.scope == "module":
        told = "the driver tells only what the whole module uses: its CPU and its memory are inside"
        flags.append(Flag(name="module-scope", severity="warning", detail=f"{uuid}: {told}"))
    if sources.board.shared:
        told = "MIG instances have no joules of their own: those of the whole board, shared with others"
        flags.append(Flag(name="shared-board", severity="warning", detail=f"{uuid}: {told}"))
    if sources.counter is not None and rejected is not None:
        told = f"energy counter rejected: {rejected}; {quantity.label} is integrated instead"
        flags.append(Flag(name="counter-rejected", severity="warning", detail=f"{uuid}: {told}"))
    return tuple(flags)


def open_nvml(targets: Targets, cache_dir: Path | None = None) -> list[NvmlMeter]:
    """One meter for each board that the targets lie on, in their order.

    A board that was not checked since the host was started is watched for one to three seconds, all such
    boards at once; ``cache_dir`` is where the outcome is kept.

    Raises ``MeterDoesNotApply`` for targets without GPUs, and ``MeterError`` where there is no driver, or
    one of the boards does not answer or tells neither energy nor power.
    """
    if not targets.gpus:
        raise MeterDoesNotApply("nvml: the test uses no GPU")
    session = _session()
    try:
        found = [find_sources(session, board) for board in _boards(session, targets.gpus)]
        results = _checked(session, found, CheckCache(cache_dir))
        meters: list[NvmlMeter] = []
        try:
            for sources in found:
                meters.append(_meter(sources, results[sources.board.uuid]))
        except MeterError:
            for meter in meters:
                meter.close()
            raise
        return meters
    finally:
        session.close()


def _session() -> Session:
    try:
        return Session()
    except DeviceError as error:
        raise _as_meter_error(error) from None


def _as_meter_error(error: DeviceError) -> MeterError:
    return MeterError(str(error).replace("NVML: ", "nvml: ", 1))


def _boards(session: Session, uuids: Sequence[str]) -> list[BoardHandle]:
    """Each board once, also where several of its MIG instances are targets."""
    boards: dict[str, BoardHandle] = {}
    for uuid in uuids:
        try:
            board = session.board(uuid)
        except DeviceError as error:
            raise _as_meter_error(error) from None
        if board.shared or board.uuid not in boards:
            boards[board.uuid] = board
    return list(boards.values())


def _meter(sources: Sources, result: CheckResult) -> NvmlMeter:
    own_session = _session()
    try:
        return NvmlMeter(own_session, sources, result)
    except MeterError:
        own_session.close()
        raise


def _checked(session: Session, found: Sequence[Sources], cache: CheckCache) -> dict[str, CheckResult]:
    driver, boot = str(session.module.nvmlSystemGetDriverVersion()), boot_id()
    keys = {
        sources.board.uuid: CheckedBoard(
            uuid=sources.board.uuid, driver=driver, boot=boot, sources=[one.label for one in sources.polled]
        )
        for sources in found
    }
    results = {uuid: result for uuid, key in keys.items() if (result := cache.load(key)) is not None}
    unchecked = {sources.board.uuid: sources for sources in found if sources.board.uuid not in results}
    if unchecked:
        from pytest_llenergy.meters.selfcheck import check

        fresh = check(
            {uuid: _poll(session, sources) for uuid, sources in unchecked.items()},
            {uuid: sources.power_age_s for uuid, sources in unchecked.items()},
        )
        for uuid, result in fresh.items():
            cache.store(keys[uuid], result)
        results.update(fresh)
    return results


def _poll(session: Session, sources: Sources) -> Poll:
    def poll() -> tuple[float | None, float | None]:
        values = session.read(sources.board.handle, sources.polled)
        if isinstance(values[0], str):
            raise MeterError(f"nvml: {values[0]} ({sources.board.uuid})")
        if sources.counter is None:
            return None, values[0]
        watts = values[1] if len(values) > 1 else None
        return values[0], None if isinstance(watts, str) else watts

    return poll


SPEC = MeterSpec(name="nvml", kind="measured", open=open_nvml, host_wide=False)
