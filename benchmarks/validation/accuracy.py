# SPDX-License-Identifier: Apache-2.0
"""Part 2, accuracy and repeatability: the same work in windows of many lengths, and compared with itself."""

from __future__ import annotations

import math
import sys
from random import Random
from statistics import fmean, median

from pytest_llenergy.compare.statistics import Estimate, Sample, compare_samples

from . import refit
from .part import Notebook, main
from .results import Line
from .stability import Window, measure_rounds, measure_step_s, measure_window
from .work import Steps, lease_board, make_steps

BUDGET_S = 120.0

#: Seconds of work per round, and the number of rounds.
WINDOWS = ((0.05, 6), (0.1, 5), (0.25, 4), (0.5, 4), (1.0, 3), (2.5, 2), (5.0, 1))
DRY_WINDOWS = ((0.05, 4), (0.5, 2))

#: Comparison of the work with itself: number of blocks of four rounds (ABBA), and seconds of work per round.
BLOCKS, BLOCK_S = 12, 0.2
DRY_BLOCKS = 3

#: Seconds reserved for the comparison, the noise and writing the results.
RESERVE_S = 40.0
DRY_RESERVE_S = 15.0

#: Number of random relabellings of the two sides, to count false alarms.
RELABELLINGS = 200

#: Two numbers agree if they differ by at most this many standard uncertainties.
COVERAGE = 2.0


def body(notebook: Notebook) -> None:
    """Measure windows of all lengths, then ABBA, then simulate the gate with the measured noise."""
    with lease_board(notebook):
        work = make_steps(notebook)
        each_s = measure_step_s(work)
        notebook.find(f"work: {work.what}, {each_s * 1e3:.2f} ms each")
        _measure_windows(notebook, work, each_s)
        values = _measure_abba(notebook, work, each_s)
    if values is not None:
        _report_noise(notebook, values)


def _measure_windows(notebook: Notebook, work: Steps, each_s: float) -> None:
    found: list[Window] = []
    reserve_s = DRY_RESERVE_S if notebook.dry else RESERVE_S
    for seconds, rounds in DRY_WINDOWS if notebook.dry else WINDOWS:
        if notebook.left_s < reserve_s + rounds * (seconds + 1.0):
            notebook.check(f"windows of {seconds:g} s", None, "out of time")
            continue
        one = measure_window(work, seconds, rounds, each_s)
        if isinstance(one, str):
            notebook.check(f"windows of {seconds:g} s have a value", False, one)
        else:
            found.append(one)
    if not found:
        return
    # The longest windows are the reference because they are the hardest to get wrong.
    reference = found[-1]
    rows: list[list[str | float | int | None]] = []
    agreeing = []
    for one in found:
        difference = one.mean_j / reference.mean_j - 1
        u = math.hypot(one.u_j, reference.u_j if one is not reference else 0.0) / reference.mean_j
        agrees = one is reference or abs(difference) <= COVERAGE * u
        agreeing.append(agrees)
        rows.append(
            [
                *(one.seconds, len(one.values_j), one.mean_j, _percent(one.spread)),
                *(_percent(fmean(one.each_u_j) / one.mean_j), _percent(one.u_j / one.mean_j)),
                *(_percent(difference), _percent(COVERAGE * u), "yes" if agrees else "NO"),
                one.temperature_c,
                ", ".join(one.flags),
            ]
        )
    notebook.table(
        "The same decoding in windows of many lengths",
        [
            *("window s", "rounds", "J/token", "spread %", "u of a round %", "u of the mean %"),
            *("deviation from the longest %", "allowed deviation %", "agrees", "°C at the start", "flags"),
        ],
        rows,
        "u: stated standard uncertainty for comparisons on this board. Allowed deviation: twice that of the "
        "difference.",
    )
    _window_figure(notebook, found, reference)
    notebook.data["windows"] = [
        {"seconds": one.seconds, "mean_j": one.mean_j, "u_j": one.u_j, "values_j": list(one.values_j)}
        for one in found
    ]
    largest = max(abs(one.mean_j / reference.mean_j - 1) for one in found)
    notebook.check(
        "J/token agrees between all windows within the stated uncertainty",
        all(agreeing),
        f"{sum(agreeing)} of {len(found)} lengths; at most {largest:.2%} from {reference.seconds:.1f} s",
    )
    inside, many = _within_own_mean(found)
    notebook.find(f"{inside} of {many} rounds lie within twice their uncertainty of the mean of their length")


def _within_own_mean(found: list[Window]) -> tuple[int, int]:
    inside = many = 0
    for one in found:
        mean_j = fmean(one.values_j)
        many += len(one.values_j)
        inside += sum(
            abs(value - mean_j) <= COVERAGE * u_j
            for value, u_j in zip(one.values_j, one.each_u_j, strict=True)
        )
    return inside, many


def _window_figure(notebook: Notebook, found: list[Window], reference: Window) -> None:
    x = [one.seconds for one in found]
    scattered = [(one.seconds, value) for one in found for value in one.values_j]
    notebook.figure(
        "Joules per token by window length",
        "window (s)",
        "J/token",
        [
            Line(
                label="mean, twice its u",
                x=x,
                y=[one.mean_j for one in found],
                errors=[COVERAGE * one.u_j for one in found],
                style="points",
            ),
            Line(label="rounds", x=[a for a, _ in scattered], y=[b for _, b in scattered], style="dots"),
            Line(label="longest", x=[x[0], x[-1]], y=[reference.mean_j] * 2),
        ],
        log_x=True,
    )


def _measure_abba(notebook: Notebook, work: Steps, each_s: float) -> list[float] | None:
    """Return the joules of rounds labelled A and B alternately; the work is the same."""
    blocks = DRY_BLOCKS if notebook.dry else BLOCKS
    blocks = min(blocks, int((notebook.left_s - 8.0) / (4 * (BLOCK_S + 0.8))))
    if blocks < 3:
        notebook.check("the work compared with itself", None, "out of time")
        return None
    found = measure_rounds(work, max(1, round(BLOCK_S / each_s)), 4 * blocks, each_s)
    values = [round_.energy_j for round_ in found.rounds]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        notebook.check(
            "the work compared with itself", False, f"{len(values) - len(known)} rounds have no value"
        )
        return None
    us = [round_.energy_u_j or 0.0 for round_ in found.rounds]
    estimate = _compare(known, us, [place % 4 in (1, 2) for place in range(len(known))])
    notebook.data["abba_j"] = known
    notebook.data["abba_u_j"] = us
    notebook.table(
        f"The work compared with itself, {blocks} x ABBA",
        ["verdict", "ratio", "low", "high", "noise %", "detectable %", "meters cannot tell %"],
        [
            [
                *(estimate.verdict, estimate.ratio, estimate.low, estimate.high, _percent(estimate.noise)),
                *(_percent(estimate.detectable), _percent(estimate.meter)),
            ]
        ],
        estimate.reason,
    )
    calm = estimate.verdict not in ("regressed", "improved")
    notebook.check("no alarm when nothing changed", calm, estimate.reason)
    alarms = _count_alarms(known, us)
    notebook.find(f"sides relabelled {RELABELLINGS} times: {alarms} alarms")
    notebook.check("sides relabelled: alarms in at most 5 %", alarms <= 0.05 * RELABELLINGS, f"{alarms}")
    index = [float(place) for place in range(len(known))]
    middle = median(known)
    relative = [100 * (value / middle - 1) for value in known]
    notebook.figure(
        "The same work repeated",
        "round",
        "joules, deviation from the median (%)",
        [Line(label="rounds", x=index, y=relative, errors=[100 * u / middle for u in us], style="points")],
    )
    return known


def _compare(values: list[float], us: list[float], is_head: list[bool]) -> Estimate:
    base, head = (
        Sample(
            tuple(value for value, head in zip(values, is_head, strict=True) if head is side),
            tuple(u for u, head in zip(us, is_head, strict=True) if head is side),
        )
        for side in (False, True)
    )
    return compare_samples(base, head)


def _count_alarms(values: list[float], us: list[float]) -> int:
    """Count the alarms when baseline and head are assigned at random within each pair of neighbours."""
    random = Random(1)
    alarms = 0
    for _ in range(RELABELLINGS):
        is_head: list[bool] = []
        for _pair in range(len(values) // 2):
            first = random.random() < 0.5
            is_head += [first, not first]
        alarms += _compare(values, us, is_head).verdict in ("regressed", "improved")
    return alarms


def _report_noise(notebook: Notebook, values: list[float]) -> None:
    """Describe the noise of the rounds and how often the gate is wrong with it."""
    world = refit.fit_machine(values)
    notebook.data["noise"] = refit.to_primitives(world)
    notebook.table(
        "The noise of the rounds",
        ["noise %", "memory", "outliers %", "outlier size", "ramp %"],
        [
            [
                *(_percent(world.noise), world.memory, _percent(world.outliers), world.outlier_size),
                _percent(world.ramp),
            ]
        ],
        "Parameters of the gate's simulation: benchmarks/plugin/gate. The offset between sessions is not "
        "in it.",
    )
    suites = 1 if notebook.dry else 6
    if notebook.left_s < 8.0:
        notebook.check("the gate with this noise", None, "out of time; run benchmarks.validation.refit")
        return
    refit.add_results(notebook, refit.simulate_gate(world, suites))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


if __name__ == "__main__":
    sys.exit(main("accuracy", body, BUDGET_S))
