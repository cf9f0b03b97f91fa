# SPDX-License-Identifier: Apache-2.0
"""Part 1, the sensor: tick period, agreement of its values, and averaging window."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from random import Random
from statistics import fmean, pstdev
from typing import Any

from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.energy.meters.nvml import COUNTERS, POWERS, counter_coverage, sensor_coverage
from pytest_llenergy.energy.selfcheck import CheckResult, evaluate_readings

from . import reading
from .machine import AVERAGE
from .part import Notebook, main
from .reading import Readings
from .results import Line
from .sensor_model import (
    SensorModel,
    Timing,
    Wave,
    counter_powers,
    find_changes,
    fit_sensor,
    measure_timing,
    predict_scatter,
    reading_powers,
)
from .work import Load, lease_board, make_load

BUDGET_S = 85.0

#: Seconds of the stretches, and of each square wave.
SETTLE_S, IDLE_S, STEADY_S, WAVE_S = 1.0, 8.0, 5.0, 2.6
DRY_IDLE_S, DRY_STEADY_S, DRY_WAVE_S = 1.5, 2.0, 2.0

#: Duration of the load, and about that of the pause after it (seconds).
HALF_PERIODS_S = (0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5)
DRY_HALF_PERIODS_S = (0.02, 0.035, 0.1)

#: Number of single bursts, and the seconds of each and of the idle time after it.
BURSTS, BURST_S, REST_S = 4, 0.3, 2.5

#: Calls of each reading that are timed.
CALLS = 200

#: Factors that vary the pauses, so that no wave is in phase with the ticks.
PAUSE_JITTER = 0.3

#: Uncertainty of a measured coverage, relative.
COVERAGE_U = 0.25

#: Below this share of explained variance a fit is ignored.
MIN_R2 = 0.7


@dataclass(frozen=True)
class Stretch:
    """A stretch of activity from start to end (monotonic ns)."""

    name: str
    start_ns: int
    end_ns: int
    on: tuple[tuple[int, int], ...] = ()
    half_s: float | None = None


def body(notebook: Notebook) -> None:
    """Read the board at idle, at steady load and under square waves, and characterise its sensor."""
    with lease_board(notebook) as uuid:
        name = _time_calls(notebook, uuid)
        busy = make_load(notebook)
        notebook.find(f"load: {busy.what}")
        file = notebook.file("readings.npy")
        with reading.read_all(uuid, file):
            stretches = _run_stretches(busy, notebook)
            time.sleep(0.3)
    readings = reading.load_readings(file)
    file.unlink()
    _save(notebook, name, readings, stretches)
    notebook.data["stretches"] = [
        {
            "name": one.name,
            "start_ns": one.start_ns,
            "end_ns": one.end_ns,
            "on": [list(part) for part in one.on],
        }
        for one in stretches
    ]
    times = _report_ticks(notebook, readings, stretches)
    _check_agreement(notebook, readings, stretches)
    _check_coverage(notebook, readings, stretches, times, name)


def _time_calls(notebook: Notebook, uuid: str) -> str:
    """Report how long each reading of an idle board takes. Returns the board's name."""
    import numpy as np

    session = Session()
    board = session.open_board(uuid)
    rows: list[list[str | float | int | None]] = []
    for quantity in (*COUNTERS, *POWERS, AVERAGE):
        read = session.make_reader(board.handle, quantity)
        times_ms, first, cpu_s = [], read(), time.process_time()
        for _ in range(CALLS):
            begin_ns = time.perf_counter_ns()
            read()
            times_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
        cpu_ms = (time.process_time() - cpu_s) / CALLS * 1e3
        row = [*(float(np.quantile(times_ms, share)) for share in (0.5, 0.99, 1.0)), cpu_ms]
        rows.append([quantity.label, *row, first if isinstance(first, str) else "yes"])
    session.close()
    notebook.table(
        "Duration of a reading, GPU idle",
        ["value", "median ms", "99 % ms", "longest ms", "CPU ms", "available"],
        rows,
    )
    return board.name


def _save(notebook: Notebook, product: str, readings: Readings, stretches: list[Stretch]) -> None:
    """Save all readings for later analysis, and the changes alone as a recording (seconds, W, J)."""
    import numpy as np

    columns: dict[str, Any] = readings._asdict()
    np.savez_compressed(notebook.file("readings.npz"), **columns)
    zero_ns = readings.time_ns[0]
    changes: dict[str, Any] = {}
    for name, values in (
        ("counter_j", readings.counter_j),
        ("instant_w", readings.instant_w),
        ("average_w", readings.average_w),
        ("usage_w", readings.usage_w),
    ):
        moments, at = find_changes(readings.time_ns, values)
        changes[name], changes[f"{name[:-2]}_s"] = values[at], (moments - zero_ns) / 1e9
    on = [(np.array(part) - zero_ns) / 1e9 for stretch in stretches for part in stretch.on]
    np.savez_compressed(
        notebook.out / "recording.npz", name=product, load_s=np.array(on).reshape(-1, 2), **changes
    )


def _run_stretches(busy: Load, notebook: Notebook) -> list[Stretch]:
    random = Random(1)
    idle_s, steady_s, wave_s = (
        (DRY_IDLE_S, DRY_STEADY_S, DRY_WAVE_S) if notebook.dry else (IDLE_S, STEADY_S, WAVE_S)
    )
    time.sleep(SETTLE_S)
    stretches = [_idle("idle", idle_s)]
    start_ns, end_ns = busy.on(steady_s)
    # Power is not steady while the clocks ramp up.
    stretches.append(
        Stretch("steady load", start_ns + (end_ns - start_ns) // 5, end_ns, ((start_ns, end_ns),))
    )
    stretches.append(_idle("idle, warm", idle_s))
    if not notebook.dry:
        stretches.append(_bursts(busy))
    for half_s in DRY_HALF_PERIODS_S if notebook.dry else HALF_PERIODS_S:
        on: list[tuple[int, int]] = []
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < max(wave_s, 5 * half_s):
            on.append(busy.on(half_s))
            time.sleep(half_s * (1 + PAUSE_JITTER * (2 * random.random() - 1)))
        name = f"square wave, {half_s * 1e3:.0f} ms"
        stretches.append(Stretch(name, on[0][0], on[-1][1], tuple(on), half_s))
    return stretches


def _bursts(busy: Load) -> Stretch:
    begin_ns = time.monotonic_ns()
    on = []
    for _ in range(BURSTS):
        on.append(busy.on(BURST_S))
        time.sleep(REST_S)
    return Stretch("single bursts", begin_ns, time.monotonic_ns(), tuple(on))


def _idle(name: str, seconds: float) -> Stretch:
    start_ns = time.monotonic_ns()
    time.sleep(seconds)
    return Stretch(name, start_ns, time.monotonic_ns())


def _report_ticks(notebook: Notebook, readings: Readings, stretches: list[Stretch]) -> dict[str, Timing]:
    """Report the ticks of each value; returns those over all stretches together."""
    import numpy as np

    columns = {
        "energy counter": readings.counter_j,
        "field 185, average power": readings.average_w,
        "field 186, instant power": readings.instant_w,
        "nvmlDeviceGetPowerUsage": readings.usage_w,
    }
    rows: list[list[str | float | int | None]] = []
    whole: dict[str, Timing] = {}
    for name, values in columns.items():
        if np.isnan(values).all():
            notebook.find(f"{name}: this board does not provide it")
            continue
        for place, stretch in enumerate([None, *stretches]):
            inside = (
                slice(None)
                if stretch is None
                else (readings.time_ns >= stretch.start_ns) & (readings.time_ns < stretch.end_ns)
            )
            found = measure_timing(readings.time_ns[inside], values[inside])
            if place == 0:
                whole[name] = found
            ms = [
                None if each is None else each * 1e3
                for each in (
                    found.period_s,
                    found.jitter_s,
                    found.late95_s,
                    found.shortest_s,
                    found.longest_s,
                )
            ]
            rows.append([name, "all" if stretch is None else stretch.name, found.ticks, *ms, found.missed])
    notebook.table(
        "Ticks",
        [
            "value",
            "while",
            "ticks",
            "period ms",
            "jitter ms",
            "95 % within ms",
            "shortest ms",
            "longest ms",
            "missed",
        ],
        rows,
        f"Read every {readings.pause_s * 1e3:.2f} ms (median), part of the jitter. Missed: gaps of more "
        "than 1.5 periods, in which a value may have been repeated.",
    )
    for name, found in whole.items():
        if found.period_s is not None and found.jitter_s is not None:
            notebook.find(
                f"{name}: a tick every {found.period_s * 1e3:.2f} ms, jitter {found.jitter_s * 1e3:.2f} ms"
            )
    notebook.data["timing"] = {name: found.plain for name, found in whole.items()}
    wide_ms = readings.wide_ns / 1e6
    notebook.find(
        f"reading all values takes {np.median(wide_ms):.3f} ms (median), {np.quantile(wide_ms, 0.99):.3f} ms "
        f"(99 %), {wide_ms.max():.2f} ms at most"
    )
    return whole


def _check_agreement(notebook: Notebook, readings: Readings, stretches: list[Stretch]) -> None:
    """Compare the counter with integrated instant power, using the plugin's own self-check."""
    import numpy as np

    if np.isnan(readings.counter_j).all() or np.isnan(readings.instant_w).all():
        notebook.check("counter against integrated power", None, "the board does not provide both")
        return
    rows: list[list[str | float | int | None]] = []
    judged: dict[str, CheckResult] = {}
    for stretch in stretches:
        result = judged[stretch.name] = evaluate_readings(
            readings.between(stretch.start_ns, stretch.end_ns).for_judge()
        )
        rows.append(
            [
                stretch.name,
                result.ticks,
                result.mean_w,
                result.ratio,
                result.ratio_margin,
                result.reason or "agrees",
            ]
        )
    notebook.table(
        "Energy counter over the integral of field 186",
        ["while", "ticks", "mean W", "ratio", "margin", "self-check"],
        rows,
        "Uncertainty: what the sampling leaves open in the ratio.",
    )
    for name in ("idle", "steady load"):
        result = judged[name]
        detail = result.reason or (f"ratio {result.ratio:.4f}" if result.ratio else "no ratio")
        notebook.check(f"the self-check accepts the counter at {name}", result.reason is None, detail)


def _check_coverage(
    notebook: Notebook,
    readings: Readings,
    stretches: list[Stretch],
    times: dict[str, Timing],
    product: str,
) -> None:
    """Compare the sensor's coverage, fitted to the waves, with the plugin's assumption."""
    waves = [stretch for stretch in stretches if stretch.half_s is not None]
    # A wave includes the readings before it: an averaging sensor looks back.
    wave = Wave([on for stretch in stretches for on in stretch.on])
    ticks = {
        "energy counter": counter_powers(readings.time_ns, readings.counter_j),
        "field 186, instant power": reading_powers(readings.time_ns, readings.instant_w),
        "field 185, average power": reading_powers(readings.time_ns, readings.average_w),
        "nvmlDeviceGetPowerUsage": reading_powers(readings.time_ns, readings.usage_w),
    }
    models: dict[str, SensorModel] = {}
    rows: list[list[str | float | int | None]] = []
    for name, (moments, powers) in ticks.items():
        period_s = times[name].period_s if name in times else None
        model = fit_sensor(wave, moments, powers, waves[0].start_ns) if period_s is not None else None
        if model is None or period_s is None:
            continue
        models[name] = model
        ms = [1e3 * each for each in (period_s, model.window_s, model.low_s, model.high_s, model.lag_s)]
        rows.append(
            [
                name,
                model.ticks,
                *ms,
                model.coverage(period_s),
                model.r2,
                model.idle_w,
                model.busy_w,
            ]
        )
        notebook.find(
            f"{name}: averages {model.window_s * 1e3:.1f} ms of each {period_s * 1e3:.1f} ms, coverage "
            f"{model.coverage(period_s):.2f}; this explains {model.r2:.1%} of the variance of its ticks"
        )
    notebook.table(
        "Averaging window of the sensor, from square waves",
        [
            "value",
            "ticks",
            "period ms",
            "window ms",
            "low ms",
            "high ms",
            "lag ms",
            "coverage",
            "R²",
            "idle W",
            "busy W",
        ],
        rows,
        "Low and high: bounds of the windows that fit about equally well.",
    )
    notebook.data["models"] = {
        name: {
            **model.plain,
            "period_s": times[name].period_s,
            "coverage": model.coverage(times[name].period_s or 1.0),
        }
        for name, model in models.items()
    }
    best = next((name for name in ticks if name in models), None)
    if best is None:
        notebook.check("coverage of the sensor", None, "too few ticks")
        return
    model, period_s = models[best], times[best].period_s or 1.0
    coverage = counter_coverage if best == "energy counter" else sensor_coverage
    assumed, known = coverage(product, period_s)
    notebook.data["assumed_coverage"] = assumed
    measured = model.coverage(period_s)
    notebook.check(
        "the plugin assumes no more coverage than the sensor has",
        assumed <= measured * (1 + COVERAGE_U) if model.r2 >= MIN_R2 else None,
        f"{'stated' if known else 'assumed'} {assumed:.2f}, measured {measured:.2f} by the {best}",
    )
    _report_scatter(notebook, waves, model, period_s, *ticks[best])
    _plot_wave(notebook, waves, readings)


def _report_scatter(
    notebook: Notebook, waves: list[Stretch], model: SensorModel, period_s: float, moments: Any, powers: Any
) -> None:
    """Tabulate the scatter of the ticks under each wave, and what it would be for either kind of sensor."""
    rows: list[list[str | float | int | None]] = []
    lines: dict[str, list[float]] = {"seen": [], "window as fitted": [], "samples all the time": []}
    for stretch in waves:
        inside = (moments > stretch.start_ns + period_s * 1e9) & (moments < stretch.end_ns)
        if inside.sum() < 4:
            continue
        wave = Wave(stretch.on)
        seen = float(powers[inside].std(ddof=1))
        fitted = predict_scatter(wave, moments[inside], model, model.window_s)
        full = predict_scatter(wave, moments[inside], model, period_s)
        lengths_ms = [(end - start) / 1e6 for start, end in stretch.on]
        rows.append(
            [
                (stretch.half_s or 0) * 1e3,
                fmean(lengths_ms),
                pstdev(lengths_ms),
                int(inside.sum()),
                seen,
                fitted,
                full,
            ]
        )
        for name, value in zip(lines, (seen, fitted, full), strict=True):
            lines[name].append(float(value or 0.0))
    notebook.table(
        "Scatter of the ticks' power under square waves",
        ["on ms", "was on ms", "± ms", "ticks", "seen W", "window as fitted W", "samples all the time W"],
        rows,
    )
    x = [float(row[0] or 0) for row in rows]
    styles = ("points", "line", "line")
    notebook.figure(
        "Scatter of the ticks under a load that goes on and off",
        "load on, then off (ms)",
        "standard deviation of the ticks' power (W)",
        [
            Line(label=name, x=x, y=y, style=style)
            for (name, y), style in zip(lines.items(), styles, strict=True)
        ],
        log_x=True,
    )


def _plot_wave(notebook: Notebook, waves: list[Stretch], readings: Readings) -> None:
    """Plot one wave as the board reports it."""
    import numpy as np

    stretch = max(waves, key=lambda one: one.half_s or 0)
    part = readings.between(stretch.start_ns - 200_000_000, stretch.end_ns + 200_000_000)
    lines = []
    zero_ns = stretch.start_ns
    if not np.isnan(part.counter_j).any():
        moments, powers = counter_powers(part.time_ns, part.counter_j)
        lines.append(_line("energy counter", moments, powers, zero_ns))
    for label, values in (("field 186", part.instant_w), ("field 185", part.average_w)):
        if not np.isnan(values).any():
            moments, at = find_changes(part.time_ns, values)
            lines.append(_line(label, moments, values[at], zero_ns))
    edges = [(moment - zero_ns) / 1e9 for on in stretch.on for moment in on]
    top = max((max(line.y, default=0.0) for line in lines), default=1.0)
    lines.append(Line(label="load on", x=edges, y=[0.0, top][::-1] * (len(edges) // 2), style="steps"))
    notebook.figure(f"{stretch.name}: as the board reports it", "s", "W", lines)


def _line(label: str, moments: Any, powers: Any, zero_ns: int) -> Line:
    x = [round(float(moment - zero_ns) / 1e9, 5) for moment in moments]
    return Line(label=label, x=x, y=[round(float(power), 2) for power in powers], style="steps")


if __name__ == "__main__":
    sys.exit(main("sensor", body, BUDGET_S))
