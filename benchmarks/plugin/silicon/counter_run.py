# SPDX-License-Identifier: Apache-2.0
"""Hold rounds against the board's own counter, read far from the work, from recordings without a meter.

Each line is a stretch of work between quiet gaps: its energy as a round and as a single window, and what the
counter says from ticks up to 0.7 s away, with the power there. An external meter alone would show a gain.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))

from recordings import COUNTER, CounterRecording, load_counters, replay

from pytest_llenergy.energy.host_window import account_window, window_record
from pytest_llenergy.record.record import Round, WindowRecord
from tests.energy.waves import EPOCH, S
from tests.measure.marks import account_here, iteration, measured_round

#: Quiet gaps of a round, and how far from the work the counter is read for comparison (seconds).
GAP_S, NEAR_S, FAR_S = 0.36, 0.35, 0.7


class Stretch(NamedTuple):
    """A stretch of work (seconds), its results, and the range of what distant ticks say (J)."""

    start_s: float
    duration_s: float
    as_round: Round
    as_window: WindowRecord
    far_j: tuple[float, float]


def stretches_of(of: CounterRecording, seed: int = 1) -> list[Stretch]:
    """Replay a recording to the package, and return each stretch of work."""
    work = of.work(GAP_S)
    series = replay(of, COUNTER, Random(seed), work, work[-1][1] + 1.5, in_rounds=True)
    found = []
    for start_s, end_s in work:
        start_ns, end_ns, before_ns, after_ns = (
            EPOCH + round(each * S) for each in (start_s, end_s, start_s - GAP_S, end_s + GAP_S)
        )
        measured = measured_round(iteration(start_ns, end_ns), gaps=(before_ns, after_ns))
        window = window_record("", start_ns, end_ns, [account_window([series], start_ns, end_ns, [])])
        far_j = of.far_j(start_s, end_s, NEAR_S), of.far_j(start_s, end_s, FAR_S)
        found.append(Stretch(start_s, end_s - start_s, account_here(measured, [series]), window, far_j))
    return found


def _shown(found: Round | WindowRecord) -> str:
    return "–" if found.energy_j is None else f"{found.energy_j:.1f} ± {found.energy_u_j:.1f} J"


def main() -> None:
    """Print a table for each recording."""
    try:
        recordings = load_counters()
    except LookupError as error:
        sys.exit(str(error))
    for of in recordings:
        print(f"|{of.raw['name']}|length|round|window|distant ticks|flags|\n|---|---:|---:|---:|---:|---|")
        for each in stretches_of(of):
            flags = ", ".join(sorted({flag.name for flag in each.as_round.flags})) or "–"
            far = f"{each.far_j[0]:.1f} to {each.far_j[1]:.1f} J"
            results = f"{_shown(each.as_round)}|{_shown(each.as_window)}|{far}"
            print(f"|{each.start_s:.1f} s|{each.duration_s * 1e3:.0f} ms|{results}|{flags}|")


if __name__ == "__main__":
    main()
