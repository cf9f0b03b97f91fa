# SPDX-License-Identifier: Apache-2.0
"""NVIDIA boards: the energy counter that the driver keeps, or else its power reading, integrated.

Blind times of power sensors were measured by Yang, Adamek and Armour, "Part-time Power Measurements:
nvidia-smi's Lack of Attention", SC 2024; the values are in the workbook of the authors' code
(github.com/JimZeyuYang/GPU_Power_Benchmark). The authors measured the power reading. Whether the energy
counter has the same blind time is unknown of most boards; it is assumed here, since that can only make an
uncertainty too wide. That of an H200 has none: see ``FULL_TIME_COUNTERS``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_llenergy import real_time
from pytest_llenergy.devices.nvml import BoardHandle, Quantity, Session
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, within
from pytest_llenergy.energy.power_readings import IntegratedPower, PowerWatch, Refresh, refresh_from_check
from pytest_llenergy.energy.selfcheck import CheckCache, CheckedBoard, CheckResult
from pytest_llenergy.errors import DeviceError, MeterDoesNotApply, MeterError
from pytest_llenergy.record.environment import read_boot_id
from pytest_llenergy.record.record import Flag

if TYPE_CHECKING:
    from pytest_llenergy.energy.selfcheck import Poll


#: Slowest measured refresh of a power reading (seconds): that of every board since Turing.
SLOWEST_REFRESH_S = 0.1

#: Time over which nvmlDeviceGetPowerUsage averages, if it does (seconds). By nvml.h that depends on the
#: architecture, but some drivers give plain power: how a reading moves decides.
AVERAGING_S = 1.0

#: Counters, the best first. Each board is queried for every counter, since neither architecture nor product
#: name determines which it has. Grace Hopper has no counter for the GPU alone, only for the whole module.
COUNTERS = (
    Quantity("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", field=(83, 0)),
    Quantity("NVML_FI_DEV_ENERGY", field=(191, 0)),
    Quantity("nvmlDeviceGetTotalEnergyConsumption"),
    Quantity("NVML_FI_DEV_ENERGY", "module", field=(191, 1)),
)

POWER_USAGE = Quantity("nvmlDeviceGetPowerUsage")

#: Power readings, the best first: present power, then possibly averaged power.
POWERS = (
    Quantity("NVML_FI_DEV_POWER_INSTANT", field=(186, 0)),
    Quantity("NVML_FI_DEV_POWER_INSTANT", "module", field=(186, 1)),
    POWER_USAGE,
)

#: NVIDIA states an accuracy for Fermi and Kepler boards only (±5 %: nvml.h, nvmlDeviceGetPowerUsage).
#: Against external meters the power readings of 13 newer boards were off by -7.9 to +12.8 %, most of them
#: by about -5 % (Yang et al., SC 2024). As limits of a rectangular distribution, ±10 % covers that within two
#: standard uncertainties. The error has an offset too: an RTX 4090 reads 18 W low when idle.
GAIN_LIMIT, OFFSET_LIMIT_W = 0.10, 15.0

#: Power does not fall at once when the work ends: within 10 ms on an RTX 3090, 200 ms on an RTX 4090. That is
#: as much as so long at the power of the work (seconds; benchmarks/plugin/silicon).
TAIL_S = 0.0025

#: Counters and power readings are in mJ and mW.
STEP = 0.001

#: Longest and shortest time between readings (seconds); a tenth of the tick period in between. Integrated
#: power has a higher minimum, since its readings are never put off for their cost.
SLOWEST_POLL_S = 0.01
FASTEST_POLL_S = 0.002
FASTEST_POWER_POLL_S = 0.005


#: Products with how long their sensor samples in each refresh, and the refresh (seconds). H800, H200, H20 and
#: GH200 were not measured, and have the die of the H100.
_PART_TIME = (
    (("A100", "A100X", "A800", "A30", "A30X", "H100", "H800", "H200", "H20", "GH200"), 0.025, 0.1),
    (("P100", "V100", "GTX 1080"), 0.01, 0.02),
    (("Quadro RTX 8000",), 0.02, 0.1),
)

#: Ends of the names of products whose sensor samples all the time (Yang et al., SC 2024). Laptop and other
#: variants, whose names go on, were not measured.
_FULL_TIME = (
    "RTX 2060 SUPER",
    "RTX 2080 Ti",
    "TITAN RTX",
    "RTX 3070 Ti",
    "RTX 3090",
    "RTX A5000",
    "RTX 4090",
)

#: Products whose energy counter has no blind time although their power reading has. Under square
#: waves, the increments of an H200's counter follow the time at work in the whole tick: a load of 50 ms on
#: and off scatters them by 41 W, which a sensor that saw a quarter of each tick would scatter by 173 W.
FULL_TIME_COUNTERS = ("H200",)

#: The lowest share of all measured sensors, assumed where nothing was measured.
ASSUMED_SHARE = min(window_s / refresh_s for _, window_s, refresh_s in _PART_TIME)


class Coverage(NamedTuple):
    """Share of each tick (0 to 1) that a sensor samples, and whether it was measured."""

    share: float
    known: bool


def sensor_coverage(product_name: str, update_period_s: float | None = None) -> Coverage:
    """Return the coverage of the sensor of a product.

    The share is window / max(refresh, ``update_period_s``): a counter that ticks faster than the sensor
    refreshes does not make it sample longer. Products that were not measured may sample as little as any
    that was. The architecture does not tell: one Turing board samples a fifth, others all of the time.
    """
    for products, window_s, refresh_s in _PART_TIME:
        if _is_one_of(product_name, products):
            return Coverage(window_s / max(refresh_s, update_period_s or 0.0), known=True)
    full_time = product_name.endswith(_FULL_TIME)
    return Coverage(1.0 if full_time else ASSUMED_SHARE, known=full_time)


def counter_coverage(product_name: str, update_period_s: float | None = None) -> Coverage:
    """Return the coverage of the energy counter of a product: that of its sensor, unless it is known."""
    if _is_one_of(product_name, FULL_TIME_COUNTERS):
        return Coverage(1.0, known=True)
    return sensor_coverage(product_name, update_period_s)


def known_coverage(product_name: str) -> float | None:
    """Return the share of each refresh over which a power reading averages, ``None`` if unmeasured."""
    coverage = sensor_coverage(product_name)
    return coverage.share if coverage.known else None


def _is_one_of(product_name: str, products: tuple[str, ...]) -> bool:
    """Match whole words: "A1000" is not "A100", and "RTX 8000 Ada" is not "Quadro RTX 8000"."""
    return any(
        re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", product_name) for name in products
    )


class Sources(NamedTuple):
    """What can be read from a board.

    Attributes:
        board: The board.
        counter: Its energy counter, if it has one.
        cross_check: The power reading that the counter is checked against.
        power: The power reading to integrate if the counter is rejected.
        limit_w: Highest power limit that can be set, if the driver reports one. The present one is a setting.
    """

    board: BoardHandle
    counter: Quantity | None
    cross_check: Quantity | None
    power: Quantity | None
    limit_w: float | None

    @property
    def watched(self) -> Quantity | None:
        """The power reading that the self-check polls."""
        return self.cross_check if self.counter is not None else self.power

    @property
    def polled(self) -> list[Quantity]:
        """The quantities that the self-check polls."""
        return [quantity for quantity in (self.counter, self.watched) if quantity is not None]

    def smear_s(self, power: Quantity | None) -> float:
        """Return the longest time until a power reading shows a change of power in full (seconds)."""
        return AVERAGING_S if power == POWER_USAGE else 0.0

    @property
    def power_age_s(self) -> float:
        """How far the watched power reading may lag (seconds)."""
        return max(SLOWEST_REFRESH_S, self.smear_s(self.watched))


def find_sources(session: Session, board: BoardHandle) -> Sources:
    """Query all counters and power readings of a board.

    Raises:
        MeterError: If the board supports none of them, with the answer of the driver.
    """
    # One at a time, since a driver may refuse a request for several of which it knows only some.
    answers = {each: session.read(board.handle, (each,))[0] for each in (*COUNTERS, *POWERS)}
    counters, powers = (
        [each for each in kind if not isinstance(answers[each], str)] for kind in (COUNTERS, POWERS)
    )
    if not counters and not powers:
        answer = answers[POWER_USAGE]
        raise MeterError(f"nvml: {board.uuid} ({board.name}) reports neither energy nor power ({answer})")
    counter = counters[0] if counters else None
    return Sources(
        board=board,
        counter=counter,
        cross_check=next((power for power in powers if counter and power.scope == counter.scope), None),
        power=powers[0] if powers else None,
        limit_w=_limit_w(session, board),
    )


def _limit_w(session: Session, board: BoardHandle) -> float | None:
    module, found = session.module, [0]
    with suppress(module.NVMLError):
        found.append(module.nvmlDeviceGetPowerManagementLimitConstraints(board.handle)[1])
    for function in (module.nvmlDeviceGetPowerManagementDefaultLimit, module.nvmlDeviceGetEnforcedPowerLimit):
        with suppress(module.NVMLError):
            found.append(int(function(board.handle)))
    return max(found) / 1000 or None


class NvmlMeter:
    """One board, identified by UUID, since indices differ between CUDA and NVML. Each reading is one call.

    The meter owns the session and closes it.
    """

    name = "nvml"

    def __init__(self, session: Session, sources: Sources, result: CheckResult) -> None:
        self._session = session
        self._uuid = sources.board.uuid
        self._integral: IntegratedPower | None = None
        if sources.counter is not None and result.reason is None:
            quantity = sources.counter
            domain = _counter_domain(sources, sources.counter, result)
        else:
            quantity = _power_to_integrate(sources, result)
            watched = result if quantity == sources.watched else None
            refresh = refresh_from_check(watched, SLOWEST_REFRESH_S, known_coverage(sources.board.name))
            domain = _power_domain(sources, quantity, result, refresh)
            self._integral = refresh.integral(domain.watch)
        self.domains: Sequence[Domain] = (domain,)
        self.poll_period_s: float = _poll_period_s(domain)
        self._value = session.make_reader(sources.board.handle, quantity)

    def read(self) -> list[float | str]:
        begin_s = real_time.monotonic()
        value = self._value()
        if isinstance(value, str):
            return [f"nvml: {value} ({self._uuid})"]
        if self._integral is None:
            return [value]
        return [self._integral.add((begin_s + real_time.monotonic()) / 2, value)]

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
        raise MeterError(f"nvml: {sources.board.uuid}: {what}; no power to integrate")
    if sources.power == sources.watched and result.mean_w == 0:
        raise MeterError(f"nvml: {sources.board.uuid}: {what}; {sources.power.label} reads 0 W")
    return sources.power


def _domain(sources: Sources, quantity: Quantity, coverage: Coverage) -> Domain:
    """Return what counter and integrated power have in common."""
    samples = "samples" if coverage.known else "is assumed to sample"
    about_sensor = f"; its sensor {samples} {coverage.share:.0%} of the time" if coverage.share < 1 else ""
    return Domain(
        name=f"gpu:{sources.board.uuid}",
        kind="measured",
        source=quantity.name,
        scope=quantity.scope,
        resolution_j=STEP,
        tail_s=TAIL_S,
        accuracy=f"within {GAIN_LIMIT:.0%} of the reading and {OFFSET_LIMIT_W:.0f} W{about_sensor}",
        limits=within(GAIN_LIMIT, OFFSET_LIMIT_W),
        coverage=coverage.share,
        coverage_known=coverage.known,
        # The limit is that of the GPU; the CPU and memory of a module add to it.
        highest_w=sources.limit_w if quantity.scope == "board" else None,
    )


def _counter_domain(sources: Sources, counter: Quantity, result: CheckResult) -> Domain:
    coverage = counter_coverage(sources.board.name, result.period_s)
    return _domain(sources, counter, coverage)._replace(
        update_period_s=result.period_s,
        max_age_s=result.period_s if result.continuous else None,
        flags=_flags(sources, counter, None),
    )


def _power_domain(sources: Sources, power: Quantity, result: CheckResult, refresh: Refresh) -> Domain:
    domain = _domain(sources, power, sensor_coverage(sources.board.name, refresh.period_s))
    flags = _flags(sources, power, result.reason)
    if not refresh.known:
        detail = (
            f"{sources.board.uuid}: {power.label} changed too seldom while it was checked to show when it is "
            f"refreshed; its joules may lag by up to {refresh.late_s[1] * 1e3:.0f} ms"
        )
        flags += (Flag(name="meter", severity="warning", detail=detail),)
    return domain._replace(
        source=f"{power.name} integrated",
        resolution_j=refresh.period_s * STEP,
        update_period_s=refresh.period_s,
        max_age_s=refresh.max_age_s,
        smear_s=sources.smear_s(power),
        watch=PowerWatch(sources.smear_s(power), domain.highest_w, refresh.period_s),
        late_s=refresh.late_s,
        integrated=True,
        flags=flags,
    )


def _flags(sources: Sources, quantity: Quantity, rejected: str | None) -> tuple[Flag, ...]:
    details = []
    if quantity.scope == "module":
        details.append("the driver reports only the whole module, with its CPU and its memory")
    if sources.board.shared:
        details.append("MIG instances have no energy counter: the joules are those of the whole board")
    if not (coverage := sensor_coverage(sources.board.name)).known:
        details.append(
            f"what share of each tick the power sensor of {sources.board.name} sees was not measured: "
            f"{coverage.share:.0%} is assumed, unless rounds in shuffled phase show what it misses"
        )
    if sources.counter is not None and rejected is not None:
        details.append(f"energy counter rejected: {rejected}; {quantity.label} is integrated instead")
    uuid = sources.board.uuid
    return tuple(Flag(name="meter", severity="warning", detail=f"{uuid}: {each}") for each in details)


def open_nvml(targets: Targets, cache_dir: Path | None = None) -> list[NvmlMeter]:
    """Open one meter for each board of the targets, in their order.

    Boards without a cached check since the last boot are checked together, which takes one to three seconds.
    Results are cached in ``cache_dir``.

    Raises:
        MeterDoesNotApply: The targets have no GPUs.
        MeterError: There is no driver, or a board does not answer or reports neither energy nor power.
    """
    if not targets.gpus:
        raise MeterDoesNotApply("nvml: the test uses no GPU")
    session = _session()
    try:
        boards = [find_sources(session, board) for board in _boards(session, targets.gpus)]
        results = _check_boards(session, boards, CheckCache(cache_dir))
        meters: list[NvmlMeter] = []
        try:
            for sources in boards:
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
    """Open each board once, even if several of its MIG instances are targets."""
    boards: dict[str, BoardHandle] = {}
    for uuid in uuids:
        try:
            board = session.open_board(uuid)
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


def _check_boards(session: Session, boards: Sequence[Sources], cache: CheckCache) -> dict[str, CheckResult]:
    driver, boot = (
        str(session.module.nvmlSystemGetDriverVersion()),
        read_boot_id() or f"process {os.getpid()}",
    )
    keys = {
        sources.board.uuid: CheckedBoard(
            uuid=sources.board.uuid, driver=driver, boot=boot, sources=[one.label for one in sources.polled]
        )
        for sources in boards
    }
    results = {uuid: result for uuid, key in keys.items() if (result := cache.load(key)) is not None}
    unchecked = {sources.board.uuid: sources for sources in boards if sources.board.uuid not in results}
    if unchecked:
        from pytest_llenergy.energy.selfcheck import check_counters

        fresh = check_counters(
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
