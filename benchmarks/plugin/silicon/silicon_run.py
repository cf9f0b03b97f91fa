# SPDX-License-Identifier: Apache-2.0
"""Hold windows, loops and rounds against an external power meter, from recordings of real boards.

Each row is a board, a way of reading it and a kind of work: how many results have no number, and of the
others the mean and the median error, how many lie within two standard uncertainties, how many of the rest no
flag warns of, and the median of error/u, all on the sensor's own scale; how many lie within two absolute
uncertainties of what the meter says; and the median error of what Zeus and CodeCarbon would make of the same
readings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from recordings import (
    AFTER_S,
    COUNTER,
    USAGE,
    Board,
    Recording,
    load_recordings,
    replay,
    replayed,
    stitched,
)

from pytest_llenergy.energy.host_window import account_window, window_record
from pytest_llenergy.energy.trace import Mark, Series
from pytest_llenergy.record.record import Flag, Round, WindowRecord
from tests.energy.waves import EPOCH, S
from tests.measure.marks import account_here, iteration, measured_round

#: Flags that say nothing against a number, or are about the host of the benchmark.
SOFT = {"imprecise", "unmeasured", "contended", "gpu-processes"}

#: Lengths of windows, of windows in a loop and of rounds (seconds).
LENGTHS = {"windows": ((0.05, 0.3), (0.3, 1.0), (1.0, 5.0)), "loops": ((0.05, 0.3), (0.3, 1.0))}
LENGTHS["rounds"] = LENGTHS["windows"]
#: And of prefill. Decode takes three times as long, at half the power above idle.
LENGTHS["phases"] = ((0.02, 0.05), (0.05, 0.3))
DECODE = 3.0

#: Windows of a loop, rounds of a test; seconds around them.
REPEATS, ROUNDS, GAP_S, BETWEEN_S = 12, 5, 0.36, (0.8, 1.0)

#: Iterations of prefill and decode in a round.
ITERATIONS = 12


@dataclass(frozen=True)
class Case:
    """What was stated, the truth on the sensor's scale and by the meter, and what others would say (J)."""

    duration_s: float
    energy_j: float | None
    u_j: float
    u_absolute_j: float
    true_j: float
    true_u_j: float
    meter_j: float
    zeus_j: float
    codecarbon_j: float
    flagged: bool

    def holds(self, error_j: float) -> bool:
        """Whether an error is within two standard uncertainties, with that of the truth."""
        return abs(error_j) <= 2 * float(np.hypot(self.u_j, self.true_u_j))


@dataclass(frozen=True)
class Row:
    """Statistics of cases. ``nan`` where none has a number."""

    cases: int
    null: float
    bias: float = np.nan
    error: float = np.nan
    within: float = np.nan
    silent: int = 0
    fullness: float = np.nan
    absolute: float = np.nan
    zeus: float = np.nan
    codecarbon: float = np.nan

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Row:
        """Summarise cases."""
        known = [(case, case.energy_j - case.true_j) for case in cases if case.energy_j is not None]
        null, zeus, codecarbon = (
            1 - len(known) / len(cases),
            median(abs(case.zeus_j / case.true_j - 1) for case in cases),
            median(abs(case.codecarbon_j / case.true_j - 1) for case in cases),
        )
        if not known:
            return cls(len(cases), null, zeus=zeus, codecarbon=codecarbon)
        return cls(
            len(cases),
            null,
            fmean(error / case.true_j for case, error in known),
            median(abs(error) / case.true_j for case, error in known),
            fmean(case.holds(error) for case, error in known),
            sum(not case.holds(error) and not case.flagged for case, error in known),
            median(abs(error) / case.u_j for case, error in known),
            fmean(abs((case.energy_j or 0.0) - case.meter_j) <= 2 * case.u_absolute_j for case, _ in known),
            zeus,
            codecarbon,
        )


def _case(
    board: Board,
    way: str,
    span: tuple[float, float],
    found: WindowRecord | Round,
    scale_w: float = 0.0,
) -> Case:
    flags: Iterable[Flag] = found.flags
    start_s, end_s = span
    moments = np.arange(start_s, end_s, 0.1)
    if way == COUNTER:
        zeus = codecarbon = board.counter_j(end_s) - board.counter_j(start_s)
    else:
        # Zeus integrates the readings that changed within the window; CodeCarbon averages one a second.
        watts = [board.watts(moment, averaged=way == USAGE) for moment in moments]
        zeus = float(sum((a + b) / 2 * 0.1 for a, b in pairwise(watts)))
        codecarbon = fmean(board.watts(each, averaged=True) for each in np.arange(start_s, end_s, 1.0)) * (
            end_s - start_s
        )
    return Case(
        end_s - start_s,
        found.energy_j,
        found.energy_u_j or 0.0,
        found.energy_u_absolute_j or 0.0,
        board.true_j(*span),
        scale_w * (end_s - start_s),
        board.meter_j(*span),
        zeus,
        codecarbon,
        any(flag.name not in SOFT for flag in flags),
    )


def _ns(seconds: float) -> int:
    return EPOCH + round(seconds * S)


def _window(series: Series, span: tuple[float, float], marks: Sequence[Mark] = ()) -> WindowRecord:
    start_ns, end_ns = map(_ns, span)
    return window_record("", start_ns, end_ns, [account_window([series], start_ns, end_ns, [], marks)])


def draw_windows(of: Recording, way: str, rng: Random, lengths_s: tuple[float, float]) -> list[Case]:
    """Draw windows at random moments of a recording, each as if it were alone."""
    board, spans, now_s = replayed(of), [], rng.uniform(0.05, 2.0)
    while True:
        span = now_s, now_s + _log_uniform(rng, lengths_s)
        if span[1] > board.meter[0][-1]:
            break
        spans.append(span)
        now_s = span[1] + rng.uniform(0.3, 0.8)
    if not spans:
        return []
    series = replay(board, way, rng, spans, board.present[0][-1] - 0.2, in_rounds=False)
    return [_case(board, way, span, _window(series, span), of.scale_w) for span in spans]


def draw_loop(of: Recording, way: str, rng: Random, lengths_s: tuple[float, float]) -> list[Case]:
    """Draw a loop of equal work with short rests, each iteration a window of one name."""
    length_s, rest_s = _log_uniform(rng, lengths_s), rng.uniform(0.02, 0.15)
    board, spans, series = _work(of, way, rng, length_s, (rest_s, rest_s), REPEATS, in_rounds=False)
    marks = sorted(Mark(_ns(each), begins=each == a, name="step") for a, b in spans for each in (a, b))
    return [_case(board, way, span, _window(series, span, marks)) for span in spans]


def draw_rounds(of: Recording, way: str, rng: Random, lengths_s: tuple[float, float]) -> list[Case]:
    """Draw the rounds of a test between quiet gaps."""
    length_s, between_s = _log_uniform(rng, lengths_s), BETWEEN_S
    extra_s = 0.0
    if way == USAGE:
        extra_s = 1.2
        between_s = (BETWEEN_S[0] + 2 * extra_s, BETWEEN_S[1] + 2 * extra_s)
    board, spans, series = _work(of, way, rng, length_s, between_s, ROUNDS, in_rounds=True)
    found = []
    for start_s, end_s in spans:
        gaps = _ns(start_s - GAP_S - extra_s), _ns(end_s + GAP_S + extra_s)
        measured = measured_round(iteration(_ns(start_s), _ns(end_s)), gaps=gaps)
        found.append(_case(board, way, (start_s, end_s), account_here(measured, [series])))
    return found


def draw_phases(of: Recording, way: str, rng: Random, lengths_s: tuple[float, float]) -> list[Case]:
    """Draw a round of iterations of prefill and decode. What other tools say of a phase is not asked."""
    prefill_s, extra_s, now_s = _log_uniform(rng, lengths_s), 1.2 if way == USAGE else 0.0, 0.0
    iterations, spans = [], dict[str, list[tuple[float, float]]](prefill=[], decode=[])
    for _ in range(ITERATIONS):
        border_s = now_s + prefill_s * rng.uniform(0.95, 1.05)
        end_s = border_s + DECODE * prefill_s * rng.uniform(0.95, 1.05)
        iterations.append(iteration(_ns(now_s), _ns(end_s), border_ns=_ns(border_s)))
        spans["prefill"].append((now_s, border_s))
        spans["decode"].append((border_s, end_s))
        now_s = end_s
    board = stitched(of, rng, [(now_s, AFTER_S)], spans["decode"])
    series = replay(board, way, rng, [(0.0, now_s)], now_s + AFTER_S - 0.5, in_rounds=True)
    gaps = _ns(-GAP_S - extra_s), _ns(now_s + GAP_S + extra_s)
    found = account_here(measured_round(*iterations, gaps=gaps), [series])
    cases = []
    for phase in found.phases:
        parts = spans[phase.name]
        duration_s = sum(end - start for start, end in parts)
        true_j, meter_j = (sum(of_(*part) for part in parts) for of_ in (board.true_j, board.meter_j))
        u_j = phase.energy_u_j or 0.0
        off_j = float(np.hypot(u_j, 0.1 * (phase.energy_j or 0.0) + 15 * duration_s))
        flagged = any(flag.name not in SOFT for flag in found.flags)
        cases.append(
            Case(duration_s, phase.energy_j, u_j, off_j, true_j, 0.0, meter_j, np.nan, np.nan, flagged)
        )
    return cases


def _work(
    of: Recording,
    way: str,
    rng: Random,
    length_s: float,
    rests_s: tuple[float, float],
    count: int,
    *,
    in_rounds: bool,
) -> tuple[Board, list[tuple[float, float]], Series]:
    work = [(length_s * rng.uniform(0.95, 1.05), rng.uniform(*rests_s)) for _ in range(count)]
    board, spans, now_s = stitched(of, rng, work), [], 0.0
    for length_s, rest_s in work:
        spans.append((now_s, now_s + length_s))
        now_s += length_s + rest_s
    series = replay(board, way, rng, spans, spans[-1][1] + AFTER_S - 0.5, in_rounds=in_rounds)
    return board, spans, series


def _log_uniform(rng: Random, limits: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(*np.log(limits))))


DRAW = {"windows": draw_windows, "loops": draw_loop, "rounds": draw_rounds, "phases": draw_phases}


def cases_of(
    of: Recording, way: str, kind: str, lengths_s: tuple[float, float], count: int, seed: int
) -> list[Case]:
    """Return at least ``count`` cases of a row."""
    rng, found = Random(f"{of.name} {way} {kind} {lengths_s} {seed}"), list[Case]()
    while len(found) < count:
        found += DRAW[kind](of, way, rng, lengths_s)
    return found[:count]


def rows_of(recordings: Sequence[Recording], only: str, count: int, seed: int) -> Iterable[tuple[str, Row]]:
    """Yield the rows with their names. A recording whose load alternates has windows only."""
    for of in recordings:
        for way in of.ways:
            for kind in LENGTHS:
                for lengths_s in LENGTHS[kind]:
                    name = f"{of.name}, {way}, {kind} of {lengths_s[0]:g} to {lengths_s[1]:g} s"
                    if only in name and (kind == "windows" or not of.alternates):
                        yield name, Row.of(cases_of(of, way, kind, lengths_s, count, seed))


HEADER = (
    "||n|no number|bias|median error|within 2u|silent|median error/u|absolute, within 2u|Zeus|CodeCarbon|"
)


def line(name: str, row: Row) -> str:
    """Return a row of the table."""
    shares = (
        f"{row.null:.0%}|{row.bias:+.2%}|{row.error:.2%}|{row.within:.1%}|{row.silent}|{row.fullness:.2f}"
    )
    line_ = f"|{name}|{row.cases}|{shares}|{row.absolute:.0%}|{row.zeus:.1%}|{row.codecarbon:.1%}|"
    return line_.replace("+nan%", "").replace("nan%", "").replace("nan", "")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="results a row (default: 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    try:
        recordings = load_recordings()
    except LookupError as error:
        sys.exit(str(error))
    print(HEADER.replace("||n", "|board, way of reading, work|n") + "\n|---|" + "---:|" * 10)
    rows = {}
    for name, row in rows_of(recordings, args.only, args.cases, args.seed):
        rows[name] = asdict(row)
        print(line(name, row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
