# SPDX-License-Identifier: Apache-2.0
"""Measure how much work a loop loses around each wake-up of the background reader.

``PYTHONPATH=. python benchmarks/plugin/cost/cost_wakes.py [--seconds N] [--json FILE] [--markdown FILE]``.
See the README in this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

from cost_run import Lab
from cost_speed import LEARNING_S, run_beside_matrices, run_beside_python
from cost_table import OURS
from cost_world import MS, boards

from pytest_llenergy.energy import measure
from pytest_llenergy.energy.sampler import Reader

#: Time that a wake-up disturbs before and after it (ns). In one process the reader first waits for the
#: interpreter's lock, and caches refill afterwards. Wake-ups next to another process are closer together.
DISTURBED_NS = {"python": (10 * MS, 40 * MS), "matrices": (1 * MS, 4 * MS)}

WARM_UP_S = 1.0

#: Approximate duration of one timed chunk of work (seconds).
CHUNK_S = {"python": 0.001, "matrices": 0.0002}

#: Share of the losses trimmed at either end: the machine stalled in the middle of these.
TRIMMED = 0.1

RESAMPLES = 2000
#: The loop, the number of boards, and extra computing time per wake-up (s), a control of known cost.
CASES = (
    *((loop, number, 0.0) for loop in ("python", "matrices") for number in (1, 8)),
    *((loop, 1, 0.001) for loop in ("python", "matrices")),
)
Interval = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """``ratio`` is the speed with metering over that without; losses are seconds per event."""

    loop: str
    boards: int
    extra_s: float
    seconds: float
    events: int
    compared: int
    loss_s: float
    sham_s: float
    ratio: float
    u_ratio: float


class WakeRecorder:
    """Records when the reader is awake (monotonic ns) and makes it compute ``extra_s`` longer each time."""

    def __init__(self, extra_s: float) -> None:
        self._extra_s = extra_s
        self.found: list[Interval] = []

    def __enter__(self) -> WakeRecorder:
        self._turn = turn = Reader.read_due_meters

        def noted(reader: Reader) -> int:
            start_ns = time.monotonic_ns()
            after = turn(reader)
            until_s = time.thread_time() + self._extra_s
            while time.thread_time() < until_s:
                pass
            self.found.append((start_ns, time.monotonic_ns()))
            return after

        # measure() creates its reader internally and offers no hook for wake-ups.
        Reader.read_due_meters = noted  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        # As above.
        Reader.read_due_meters = self._turn  # type: ignore[method-assign]


def meter_for(uuids: list[str], seconds: float) -> Interval:
    """Meter for ``seconds`` in one window."""
    # The loop is calibrated first; it works during all of these sleeps.
    time.sleep(WARM_UP_S)
    with measure(uuids, ("nvml",)) as measuring:
        time.sleep(LEARNING_S)
        with measuring.window("span"):
            start_ns = time.monotonic_ns()
            time.sleep(seconds)
            return start_ns, time.monotonic_ns()


def merge_events(turns: Sequence[Interval], span: Interval, loop: str) -> list[Interval]:
    """Return the intervals in a span that wake-ups may disturb; overlapping ones are merged."""
    events: list[Interval] = []
    before_ns, after_ns = DISTURBED_NS[loop]
    for start_ns, end_ns in turns:
        first_ns, last_ns = start_ns - before_ns, end_ns + after_ns
        if first_ns < span[0] or last_ns > span[1]:
            continue
        if events and first_ns <= events[-1][1]:
            events[-1] = (events[-1][0], max(last_ns, events[-1][1]))
        else:
            events.append((first_ns, last_ns))
    return events


def is_free(events: Sequence[Interval], wanted: Interval) -> bool:
    """Return whether no event overlaps the interval."""
    index = bisect_right(events, wanted)
    near = events[max(0, index - 1) : index + 1]
    return all(end_ns <= wanted[0] or start_ns >= wanted[1] for start_ns, end_ns in near)


def chunks_done(times: Sequence[int], at_ns: float) -> float:
    """Return the chunks finished by then, including the fraction of the current one."""
    index = bisect_right(times, at_ns) - 1
    return index + (at_ns - times[index]) / (times[index + 1] - times[index])


def compute_loss_s(times: Sequence[int], events: Sequence[Interval], event: Interval) -> float | None:
    """Return the time lost in an event by the speed around it; None if that is disturbed too."""
    start_ns, end_ns = event
    length_ns = end_ns - start_ns
    before, after = (start_ns - length_ns, start_ns), (end_ns, end_ns + length_ns)
    if not (is_free(events, before) and is_free(events, after)):
        return None
    if before[0] <= times[0] or after[1] >= times[-1]:
        return None
    marks = [chunks_done(times, at_ns) for at_ns in (before[0], start_ns, end_ns, after[1])]
    neighbours = (marks[1] - marks[0] + marks[3] - marks[2]) / 2
    return (1 - (marks[2] - marks[1]) / neighbours) * length_ns / 1e9 if neighbours else None


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest values."""
    left_out = int(len(values) * TRIMMED)
    return fmean(sorted(values)[left_out : len(values) - left_out])


def bootstrap_u(values: Sequence[float]) -> float:
    """Return the bootstrap scatter of the trimmed mean."""
    random = Random(0)
    return stdev(trimmed_mean(random.choices(values, k=len(values))) for _ in range(RESAMPLES))


def draw_shams(events: Sequence[Interval], span: Interval, number: int) -> list[Interval]:
    """Return random intervals of the same lengths in which the reader slept."""
    random, found = Random(1), list[Interval]()
    for _ in range(100 * number):
        if len(found) == number:
            break
        start_ns, end_ns = random.choice(events)
        at_ns = random.randrange(span[0], span[1] - (end_ns - start_ns))
        sham = (at_ns, at_ns + end_ns - start_ns)
        if is_free(events, sham):
            found.append(sham)
    return found


def compute_row(
    loop: str, number: int, extra_s: float, times: Sequence[int], turns: Sequence[Interval], span: Interval
) -> Row:
    """Compute the loss per event minus that of random intervals, and from it the ratio of speeds."""
    events = merge_events(turns, span, loop)
    seconds = (span[1] - span[0]) / 1e9
    losses = [lost for each in events if (lost := compute_loss_s(times, events, each)) is not None]
    sham = [
        lost
        for each in draw_shams(events, span, 4 * len(events))
        if (lost := compute_loss_s(times, events, each)) is not None
    ]
    if min(len(losses), len(sham)) < 20:
        raise SystemExit(f"{len(losses)} events and {len(sham)} shams can be compared: increase --seconds")
    lost_s, sham_s = trimmed_mean(losses), trimmed_mean(sham)
    per_s = len(events) / seconds
    u_s = (bootstrap_u(losses) ** 2 + bootstrap_u(sham) ** 2) ** 0.5
    ratio = 1 - (lost_s - sham_s) * per_s
    return Row(loop, number, extra_s, seconds, len(events), len(losses), lost_s, sham_s, ratio, u_s * per_s)


def probe(loop: str, number: int, extra_s: float, seconds: float, directory: Path) -> None:
    """Run and meter the work in this process; prints its row as JSON."""
    spans: list[Any] = []
    run_beside = {"python": run_beside_python, "matrices": run_beside_matrices}[loop]
    with boards(number, directory) as uuids, WakeRecorder(extra_s) as turns:
        times, spans = run_beside(lambda: [meter_for(uuids, seconds)], CHUNK_S[loop])
    print(
        f"\n{json.dumps(asdict(compute_row(loop, number, extra_s, times, turns.found, spans[0])))}",
        flush=True,
    )


def render_table(rows: Sequence[Row]) -> str:
    """Render the table of the documentation."""
    head = (
        "| loop | boards read | extra per wake-up | wake-ups per second | lost per wake-up "
        "| speed with / without metering |"
    )
    lines = [
        f"| {each.loop} | {each.boards} | {each.extra_s * 1e3:g} ms | {each.events / each.seconds:.1f} | "
        f"{(each.loss_s - each.sham_s) * 1e3:.2f} ms | {each.ratio:.4f} ± {each.u_ratio:.4f} |"
        for each in rows
    ]
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | ---: |", *lines]) + "\n"


def main(argv: Sequence[str]) -> None:
    """Run each case in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="N", help="metered seconds per case (120)"
    )
    parser.add_argument("--json", type=Path, default=Path("cost_wakes.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="cost-wakes-") as directory:
        lab = Lab(Path(sys.executable), Path(directory))
        # The first construction checks the boards; the result is cached for the others.
        lab.probe("cost_probe.py", "construct", OURS, "8")
        for case in CASES:
            rows.append(Row(**lab.probe("cost_wakes.py", "probe", *map(str, case), str(args.seconds))))
            print(rows[-1], flush=True)
            args.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    print(f"\n{render_table(rows)}")
    if args.markdown:
        args.markdown.write_text(render_table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["probe"]:
        loop, number, extra_s, seconds, directory = sys.argv[2:]
        probe(loop, int(number), float(extra_s), float(seconds), Path(directory))
    else:
        main(sys.argv[1:])
