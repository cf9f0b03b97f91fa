# SPDX-License-Identifier: Apache-2.0
"""Count how often loads on servers of known capacity are called saturated. See the README in this folder."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.load_phases import load_phases
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import SATURATED, SHORT_LOAD
from pytest_llenergy.record.timeline import RequestTimeline
from tests.backends.queues import arrivals_s, queued, shared
from tests.backends.servers.start import scripted

#: Loads as shares of the capacity.
KEPT_UP, OVERLOADED = (0.5, 0.6, 0.7, 0.8), (1.3, 1.5, 2.0, 3.0)

#: Slots, requests and seed of the loads on the real server.
SHAPES = ((1, 32, 0), (2, 48, 1), (2, 64, 2), (4, 64, 3), (4, 96, 4))

#: Time of a request on the real server: two tokens (seconds).
TOKEN_S = 0.05

#: The load that used to be called steady: 6.8 requests/s are possible, 20 are asked for.
REVIEWED = (1, 32, 0, 20 / 6.8, 1 / 6.8 / 2)

STEADY = "steady"


@dataclass(frozen=True)
class Load:
    """One load on the real server, as a share of its capacity, and what it was called."""

    slots: int
    requests: int
    seed: int
    share: float
    asked_per_s: float
    flags: Sequence[Flag]

    @property
    def verdict(self) -> str:
        """``saturated``, ``short-load`` or ``steady``."""
        return verdict_of(self.flags)

    @property
    def right(self) -> bool:
        """Whether an overload was found, or another load was not called saturated."""
        return (self.verdict == SATURATED) == (self.share > 1)


def verdict_of(flags: Sequence[Flag]) -> str:
    """Return the name of the flag that a load without a steady state has."""
    return next((flag.name for flag in flags if flag.name in (SATURATED, SHORT_LOAD)), STEADY)


def serve(slots: int, requests: int, seed: int, share: float, token_s: float = TOKEN_S) -> Load:
    """Send a load of requests to a real server of so many slots, over HTTP."""
    rate = share * slots / (2 * token_s)
    backend = ServerBackend()
    command = scripted(slots=slots, first=token_s, step=token_s)
    backend.load(ModelSource("hub", "owner/name"), {"command": command, "timeout_s": 60.0}, RankContext())
    try:
        asked = {"request_rate": rate, "num_requests": requests, "seed": seed, "max_new_tokens": 2}
        job = backend.prepare_serve(["abc"], ServeParams.parse(asked))
        job.before_round()
        return Load(slots, requests, seed, share, rate, job.result(job.run()).flags)
    finally:
        backend.close()


def render_loads(loads: Sequence[Load]) -> Iterator[str]:
    """Render the loads on the real server, with the number of right and wrong answers."""
    over, under = ([each for each in loads if (each.share > 1) == wanted] for wanted in (True, False))
    yield (
        f"Overloads found: {sum(each.right for each in over)} of {len(over)}; "
        f"false alarms: {sum(not each.right for each in under)} of {len(under)}."
    )
    yield from ("", "| slots | number | asked | of capacity | called |", "|" + "---:|" * 4 + "---|")
    for each in loads:
        asked = f"{each.asked_per_s:.3g}/s | {each.share:.2g}"
        called = each.verdict if each.right else f"{each.verdict} (wrong)"
        yield f"| {each.slots} | {each.requests} | {asked} | {called} |"


def render_simulated(
    server: Callable[[int, Sequence[float]], list[RequestTimeline]], seeds: int
) -> Iterator[str]:
    """Render the share of simulated loads that were called saturated, and that had a steady state."""
    loads = (0.7, 0.8, 0.9, *OVERLOADED)
    yield f"| slots | requests | {' | '.join(f'{load:g}' for load in loads)} |"
    yield "|---:|---:|" + "---:|" * len(loads)
    for number in (32, 64, 128):
        for slots in (1, 4):
            cells = []
            for load in loads:
                found = Counter(
                    verdict_of(
                        load_phases(server(slots, arrivals_s(slots, load, number, seed)), None, 0, 1)[1]
                    )
                    for seed in range(seeds)
                )
                cells.append(f"{found[SATURATED] / seeds:.0%}, {found[STEADY] / seeds:.0%}")
            yield f"| {slots} | {number} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Print the tables. Returns 1 if a load on the real server was called by the wrong name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="simulated loads of a kind (100)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    args = parser.parse_args(argv)
    loads = [serve(*REVIEWED)]
    for share in (*KEPT_UP, *OVERLOADED):
        for shape in SHAPES:
            loads.append(serve(*shape, share))
            print(f"{loads[-1].share:g} of the capacity of {shape[0]} slots: {loads[-1].verdict}", flush=True)
    text = "\n".join(
        [
            *render_loads(loads),
            *("", "Slots with a queue, by load: share called saturated, and share with a steady state", ""),
            *render_simulated(queued, args.seeds),
            *("", "A server that takes all requests and slows down, likewise", ""),
            *render_simulated(shared, args.seeds),
            "",
        ]
    )
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text)
    return int(not all(each.right for each in loads))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
