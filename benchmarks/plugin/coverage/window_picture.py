# SPDX-License-Identifier: Apache-2.0
"""Draw one window over the ticks of a counter: ``window_picture.py PICTURE.svg``.

A simulated board at 100 W works at 500 W for 250 ms; its counter ticks every 100 ms. Reader and arithmetic
are the package's own; the result of two bare readings is shown for comparison.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import BLUE, GREY, ORANGE, RED, configure_pyplot, save_picture

from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window_arithmetic import energy_between
from tests.energy.watching import Spell, simulate_reader
from tests.energy.waves import EPOCH, MS, S, Sensor, Wave, domain

IDLE_W, WORK_W = 100.0, 500.0
WORK_NS, LATCH_NS, GAP_NS = 250 * MS, 100 * MS, 350 * MS
JITTER_NS = MS
#: Phase shown in the first panel, in ticks after a tick.
PHASE = 0.35
STEPS = 200


@dataclass(frozen=True)
class Window:
    """One window, its true energy and the package's result. Energies in joules."""

    sensor: Sensor
    series: Series
    start_ns: int
    end_ns: int
    true_j: float
    two_readings_j: float
    energy_j: float
    u_j: float

    @property
    def error(self) -> float:
        """Return the error of the package's result, relative to the truth."""
        return self.energy_j / self.true_j - 1

    @property
    def error_of_two_readings(self) -> float:
        """Return the error of two bare readings, relative to the truth."""
        return self.two_readings_j / self.true_j - 1


def window(phase: float, seed: int = 1) -> Window:
    """Simulate work that begins ``phase`` ticks after a tick was due."""
    start_ns = EPOCH + round(phase * LATCH_NS)
    end_ns = start_ns + WORK_NS
    wave = Wave(((EPOCH - 8 * S, IDLE_W), (start_ns, WORK_W), (end_ns, IDLE_W)))
    sensor = Sensor(wave, LATCH_NS, jitter_ns=JITTER_NS)
    spells = [
        Spell(start_ns - GAP_NS, start_ns, at_work=False),
        Spell(start_ns, end_ns, at_work=True),
        Spell(end_ns, end_ns + GAP_NS, at_work=False),
    ]
    of = domain(highest_w=700.0)
    series = simulate_reader(
        [sensor], Random(seed), start_ns - 3 * S, end_ns + GAP_NS + 3 * LATCH_NS, of, spells
    )
    before = quiet_power(series, start_ns - GAP_NS, start_ns)
    after = quiet_power(series, end_ns, end_ns + GAP_NS)
    found = energy_between(series, start_ns, end_ns, before, after)
    assert found.energy_j is not None
    assert found.u_j is not None
    return Window(
        sensor=sensor,
        series=series,
        start_ns=start_ns,
        end_ns=end_ns,
        true_j=wave.joules(start_ns, end_ns),
        two_readings_j=sensor.counter_j(end_ns) - sensor.counter_j(start_ns),
        energy_j=found.energy_j,
        u_j=found.u_j,
    )


def main(picture: Path) -> None:
    """Draw power, counter, and the error as a function of the moment at which the work begins."""
    plot = configure_pyplot("window")
    figure, (power, counter, errors) = plot.subplots(
        3, 1, figsize=(8, 7.6), height_ratios=(1, 1.7, 1.4), layout="constrained"
    )
    shown = window(PHASE)
    _draw_power(power, shown)
    _draw_counter(counter, shown)
    _draw_errors(errors, [window(step / STEPS, seed=step) for step in range(STEPS)])
    save_picture(figure, picture)


def _draw_power(panel: Any, shown: Window) -> None:
    start_ms, end_ms = 0.0, WORK_NS / MS
    panel.step([-300, start_ms, end_ms, 560], [IDLE_W, WORK_W, IDLE_W, IDLE_W], where="post", color="black")
    panel.fill_between([start_ms, end_ms], [WORK_W, WORK_W], color=BLUE, alpha=0.15, linewidth=0)
    panel.text(
        (start_ms + end_ms) / 2,
        WORK_W / 2,
        f"true energy:\n{shown.true_j:.1f} J",
        ha="center",
        va="center",
    )
    panel.set_ylabel("power (W)")
    panel.set_ylim(0, 560)
    panel.set_xlim(-300, 560)
    panel.set_xticklabels([])


def _draw_counter(panel: Any, shown: Window) -> None:
    times_ms = [index * 0.25 for index in range(-1200, 2241)]
    zero_j = shown.sensor.counter_j(shown.start_ns - 300 * MS)
    at = [shown.start_ns + round(ms * MS) for ms in times_ms]
    panel.plot(times_ms, [shown.sensor.counter_j(ns) - zero_j for ns in at], color=GREY, linewidth=1)
    true_zero_j = shown.sensor.wave.energy_j(shown.sensor.last_ns(at[0]))
    panel.plot(
        times_ms,
        [shown.sensor.wave.energy_j(ns) - true_zero_j for ns in at],
        color="black",
        linewidth=0.8,
        linestyle=":",
    )
    ends = [(0.0, shown.start_ns), (WORK_NS / MS, shown.end_ns)]
    read = [(ms, shown.sensor.counter_j(ns) - zero_j) for ms, ns in ends]
    panel.plot(*zip(*read, strict=True), color=RED, marker="o", linestyle="--", linewidth=1)
    panel.annotate(
        f"read at both ends:\n{shown.two_readings_j:.1f} J, {shown.error_of_two_readings:+.0%}",
        read[1],
        xytext=(14, -28),
        textcoords="offset points",
        color=RED,
    )
    for first, edge in ((True, shown.start_ns), (False, shown.end_ns)):
        tick_ns = _tick_outside(shown, edge, before=first)
        x_ms, y_j = (tick_ns - shown.start_ns) / MS, shown.sensor.counter_j(tick_ns) - zero_j
        edge_ms = (edge - shown.start_ns) / MS
        edge_j = y_j + IDLE_W * (edge - tick_ns) / S
        panel.plot([x_ms, edge_ms], [y_j, edge_j], color=BLUE, linewidth=2.5)
        panel.plot([x_ms], [y_j], color=BLUE, marker="|", markersize=12)
        panel.plot([edge_ms], [edge_j], color=BLUE, marker="o")
    panel.annotate(
        f"from the tick outside, with the idle power\nmeasured in the gap: "
        f"{shown.energy_j:.2f} ± {shown.u_j:.2f} J, {shown.error:+.2%}",
        (WORK_NS / MS, edge_j),
        xytext=(-260, 14),
        textcoords="offset points",
        color=BLUE,
    )
    for ms, _ in ends:
        panel.axvline(ms, color="#bbbbbb", linewidth=0.8, zorder=0)
    panel.set_ylabel("energy (J)\ngrey: the counter; dotted: the truth")
    panel.set_xlabel("time after the start of the work (ms)")
    panel.set_xlim(-300, 560)


def _tick_outside(shown: Window, edge_ns: int, *, before: bool) -> int:
    """Return the counter's tick next to an edge, on its quiet side."""
    if before:
        return shown.sensor.last_ns(edge_ns)
    step_ns = MS // 20
    now_ns, last_ns = edge_ns, shown.sensor.last_ns(edge_ns)
    while shown.sensor.last_ns(now_ns) == last_ns:
        now_ns += step_ns
    return shown.sensor.last_ns(now_ns)


def _draw_errors(panel: Any, windows: list[Window]) -> None:
    phases_ms = [index / STEPS * LATCH_NS / MS for index in range(STEPS)]
    bare = [each.error_of_two_readings * 100 for each in windows]
    ours = [each.error * 100 for each in windows]
    u = [each.u_j / each.true_j * 100 for each in windows]
    panel.plot(phases_ms, bare, color=RED, marker=".", linestyle="", markersize=3, label="read at both ends")
    panel.fill_between(
        phases_ms,
        [-2 * one for one in u],
        [2 * one for one in u],
        color=ORANGE,
        alpha=0.6,
        linewidth=0,
        label="± 2u",
    )
    panel.plot(phases_ms, ours, color=BLUE, marker=".", linestyle="", markersize=3, label="this tool")
    panel.set_xlabel("when the work begins after a tick (ms)")
    panel.set_ylabel("error (%)")
    panel.set_xlim(0, LATCH_NS / MS)
    mean, worst = _mean(bare), max(map(abs, bare))
    panel.set_title(
        f"the same work at {STEPS} moments. Read at both ends: {mean:+.0f} % on average, {worst:.0f} % at "
        f"worst;\nthis tool: {_mean(ours):+.2f} % on average, {max(map(abs, ours)):.1f} % at worst, "
        f"{sum(abs(error) <= 2 * one for error, one in zip(ours, u, strict=True))} within 2u",
        fontsize=9,
        loc="left",
    )
    panel.set_ylim(-42, 18)
    panel.legend(frameon=False, ncol=3, loc="upper right", markerscale=3)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
