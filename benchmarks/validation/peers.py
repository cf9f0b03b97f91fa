# SPDX-License-Identifier: Apache-2.0
"""Part 3, comparison: the same work measured at the same time by Zeus, by polling and by the plugin.

If Zeus cannot be imported, its published method is used: the driver's counter at both ends of the window.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.energy.meters.nvml import COUNTERS

from .machine import ROOT
from .part import Notebook, main
from .results import Line
from .stability import measure_step_s, measure_window
from .work import Steps, lease_board, make_steps

if TYPE_CHECKING:
    from accuracy_tools import Ask, Tool

BUDGET_S = 44.0

#: Seconds of work per window, and the number of windows of each length.
WINDOWS_S, REPEATS = (0.05, 0.1, 0.25, 1.0), 7
DRY_WINDOWS_S, DRY_REPEATS = (0.05, 0.25), 4

#: Number of reference rounds by the plugin, and their seconds of work.
REFERENCE_ROUNDS, REFERENCE_S = 3, 2.0
DRY_REFERENCE_S = 0.5

#: Rest between windows, and the range of the random time that is added to it (seconds).
REST_S, RANDOM_REST_S = 0.4, 0.1


def body(notebook: Notebook) -> None:
    """Measure nested windows around the same work and compare them with long rounds of the plugin."""
    with lease_board(notebook) as uuid:
        work = make_steps(notebook)
        each_s = measure_step_s(work)
        notebook.find(f"work: {work.what}, {each_s * 1e3:.2f} ms each")
        reference = measure_window(
            work, DRY_REFERENCE_S if notebook.dry else REFERENCE_S, REFERENCE_ROUNDS, each_s
        )
        if isinstance(reference, str):
            notebook.check("the plugin's rounds have a value", False, reference)
            return
        step_j = reference.mean_j * work.tokens_per_step
        notebook.find(
            f"in rounds of {reference.seconds:.1f} s one step takes {step_j:.4g} J "
            f"± {reference.u_j / reference.mean_j:.2%}"
        )
        tools = _tools(notebook, uuid)
        readings = _measure_windows(notebook, work, each_s, tools)
    _report(notebook, readings, step_j)


class CounterAtBothEnds:
    """The method of ``ZeusMonitor`` on a board with an energy counter, without Zeus."""

    name = "Zeus' method: the counter at both ends"

    def __init__(self, uuid: str) -> None:
        self._session = Session()
        handle = self._session.open_board(uuid).handle
        known = [one for one in COUNTERS if not isinstance(self._session.read(handle, (one,))[0], str)]
        if not known:
            raise RuntimeError("the board has no energy counter")
        self._read: Any = self._session.make_reader(handle, known[0])

    def begin(self, window: str = "burst") -> None:
        """Read the counter at the start."""
        self._start_j = self._read()

    def end(self) -> Ask:
        """Read the counter at the end. Returns what gives the difference of the two readings."""
        from accuracy_tools import Answer

        return partial(Answer, self._read() - self._start_j)

    def close(self) -> None:
        """Shut NVML down."""
        self._session.close()


def _tools(notebook: Notebook, uuid: str) -> list[Tool]:
    """Return the available tools, outermost window first; record a finding for each missing one."""
    folder = str(ROOT / "benchmarks" / "plugin" / "accuracy")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from accuracy_tools import CodeCarbon, OurWindow, PowerPolling, Zeus

    made: list[Tool] = []
    for name, make in (
        ("CodeCarbon", CodeCarbon),
        ("Zeus", lambda: Zeus(approximate=False)),
        ("the counter at both ends", lambda: CounterAtBothEnds(uuid)),
        ("power every 100 ms", lambda: PowerPolling(uuid)),
    ):
        try:
            made.append(make())
        except ImportError as error:
            notebook.find(f"{name}: its package is not installed ({error})")
        except Exception as error:
            # A tool that fails to start here is a finding about it; the others are still compared.
            notebook.find(f"{name}: {type(error).__name__}: {error}")
    return [*made, OurWindow(uuid)]


Readings = dict[float, dict[str, list[tuple[int, float | None]]]]


def _measure_windows(notebook: Notebook, work: Steps, each_s: float, tools: list[Tool]) -> Readings:
    """Return, by window length and tool, the steps of work and the joules that the tool reports."""
    random = Random(1)
    lengths_s = DRY_WINDOWS_S if notebook.dry else WINDOWS_S
    found: Readings = {seconds: {tool.name: [] for tool in tools} for seconds in lengths_s}
    # Tools that read in the background need time for their first readings.
    time.sleep(1.0)
    for _ in range(DRY_REPEATS if notebook.dry else REPEATS):
        if notebook.left_s < 3.0 + sum(lengths_s) + len(lengths_s) * (REST_S + RANDOM_REST_S):
            notebook.find("out of time: fewer windows measured than planned")
            break
        for seconds in random.sample(lengths_s, len(lengths_s)):
            count = max(1, round(seconds / each_s))
            # Start windows at a random phase of the sensor's ticks.
            time.sleep(random.random() * RANDOM_REST_S)
            for tool in tools:
                tool.begin()
            work.run(count)
            asks = [tool.end() for tool in reversed(tools)]
            # Idle power between windows, so that a window does not affect the readings of the next one.
            time.sleep(REST_S)
            for tool, ask in zip(tools, reversed(asks), strict=True):
                found[seconds][tool.name].append((count, ask().energy_j))
    for tool in tools:
        tool.close()
    return found


def _report(notebook: Notebook, readings: Readings, step_j: float) -> None:
    rows: list[list[str | float | int | None]] = []
    means: dict[str, list[tuple[float, float]]] = {}
    for seconds, by_tool in readings.items():
        for name, each in by_tool.items():
            errors = [energy_j / (count * step_j) - 1 for count, energy_j in each if energy_j is not None]
            zeros = sum(energy_j == 0 for _, energy_j in each)
            if not errors:
                rows.append([seconds, name, len(each), None, None, None, zeros, len(each)])
                continue
            absolute = fmean(map(abs, errors))
            means.setdefault(name, []).append((seconds, 100 * absolute))
            worst = max(map(abs, errors))
            bias = math.fsum(errors) / len(errors)
            rows.append(
                [
                    seconds,
                    name,
                    len(each),
                    100 * bias,
                    100 * absolute,
                    100 * worst,
                    zeros,
                    len(each) - len(errors),
                ]
            )
    notebook.table(
        "Comparison with other tools: deviation from the plugin's long rounds",
        ["window s", "tool", "windows", "mean %", "mean of sizes %", "largest %", "zeros", "no result"],
        rows,
        "The true energy is unknown here. The reference is the plugin's rounds of the same work, seconds "
        "long, where methods agree best. The outer windows include the time it takes to open the inner ones.",
    )
    notebook.data["errors_percent"] = {
        name: [list(point) for point in points] for name, points in means.items()
    }
    notebook.figure(
        "Deviation from the long rounds, mean of sizes",
        "window (s)",
        "%",
        [Line(label=name, x=[a for a, _ in each], y=[b for _, b in each]) for name, each in means.items()],
        log_x=True,
    )
    ours = dict(means.get("pytest-llenergy, window", []))
    others = [dict(points) for name, points in means.items() if not name.startswith("pytest-llenergy")]
    for seconds in ours:
        best = min((points[seconds] for points in others if seconds in points), default=None)
        if best is not None:
            detail = f"{ours[seconds]:.2f} % against {best:.2f} %"
            notebook.check(f"windows of {seconds:g} s: no tool is closer", ours[seconds] <= best, detail)


if __name__ == "__main__":
    sys.exit(main("peers", body, BUDGET_S))
