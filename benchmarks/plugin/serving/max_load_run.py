# SPDX-License-Identifier: Apache-2.0
"""Search for the maximum load of servers of known capacity, and compare with what a calculation finds.

The server (tests/backends/servers/queueing.py) has slots that serve a request in a fixed time. The
calculation puts the same arrivals through such a queue, without a server, a client or a clock. With
``--calculated``, the searches are calculated too, for many seeds, and compared with endless loads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import hypot
from pathlib import Path
from textwrap import dedent

from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.measure.loads import (
    MAX_PROBE_ROUNDS,
    LoadSearch,
    arrivals_uncertainty,
    is_decided,
    is_within,
    probe_requests,
    probe_rounds,
)
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.served import ServedRequests

ROOT = Path(__file__).resolve().parents[3]

#: Slots and seconds of service: capacities of 10, 20 and 40 requests per second.
SERVERS = ((1, 0.1), (4, 0.2), (4, 0.1))

#: Slots, seconds of service and limit of TTFT (seconds) of the calculated searches.
CALCULATED = (
    (2, 0.1, 0.2),
    (1, 0.1, 0.3),
    (4, 0.2, 0.3),
    (4, 0.1, 0.3),
    (8, 4.0, 0.5),
    (4, 2.0, 1.0),
    (4, 2.0, 2.0),
    (16, 5.0, 5.0),
    (2, 0.1, 5.0),
    (2, 0.1, 20.0),
)

#: Step of the rates that are calculated.
STEP = 1.0025

#: Requests of a load that counts as endless.
ENDLESS = 100_000

TOLERANCE = 0.05

TEST = """
    from pytest_llenergy import slo

    def test_it(energy, backend):
        energy.max_load(
            backend.serve, ["abc"], slo=slo(ttft={ttft}, attainment={attainment}), seed={seed},
            between=({low}, {high}), tolerance={tolerance}, max_new_tokens=2, budget={budget})
"""


@dataclass(frozen=True)
class Case:
    """One search."""

    slots: int
    service_s: float
    slo: Slo
    seed: int

    @property
    def capacity(self) -> float:
        """Requests per second that the server can answer."""
        return self.slots / self.service_s

    @property
    def limit_s(self) -> float:
        """Limit of the time to the first token."""
        return self.slo.ttft_s or 0.0

    def waits_s(self, offsets_s: Sequence[float]) -> list[float]:
        """Return when each request gets its first token, which comes when the service begins."""
        free_s, waits_s = [0.0] * self.slots, []
        for sent_s in offsets_s:
            begin_s = max(sent_s, heappop(free_s))
            heappush(free_s, begin_s + self.service_s)
            waits_s.append(begin_s - sent_s)
        return waits_s

    def true_maximum(self, tolerance: float) -> float:
        """Return the rate above which the same arrivals do not meet the SLO, by calculation."""
        rate = self.capacity / 4
        while self._meets(rate, tolerance):
            rate *= STEP
        return rate / STEP

    def _meets(self, rate: float, tolerance: float) -> bool:
        """Return whether all rounds together meet the SLO."""
        requests = probe_requests(rate, self.slo, tolerance)
        rounds = max(probe_rounds(requests, self.slo), MAX_PROBE_ROUNDS if requests / rate <= 30 else 2)
        waits_s = [
            wait_s
            for number in range(rounds)
            for wait_s in self.waits_s(self._offsets_s(rate, requests, number))
        ]
        return sum(wait_s <= self.limit_s for wait_s in waits_s) / len(waits_s) >= self.slo.attainment

    def _offsets_s(self, rate: float, requests: int, number: int) -> Sequence[float]:
        params = ServeParams(request_rate=rate, num_requests=requests, seed=self.seed)
        return params.offsets_s(number)

    def _round(self, rate: float, requests: int, number: int) -> Round:
        waits_s = self.waits_s(self._offsets_s(rate, requests, number))
        served = ServedRequests(
            sent_s=[0.0] * requests,
            time_to_first_token_s=waits_s,
            end_to_end_latency_s=[wait_s + self.service_s for wait_s in waits_s],
            output_tokens=[2] * requests,
            time_per_output_token_s=[self.service_s] * requests,
            good=[wait_s <= self.limit_s for wait_s in waits_s],
        )
        return Round(
            start_s=0.0,
            duration_s=requests / rate,
            energy_j=None,
            energy_u_j=None,
            energy_u_absolute_j=None,
            served=served,
        )

    def calculated_search(self, tolerance: float) -> tuple[float, float]:
        """Return the maximum that a search finds without a server, and its standard uncertainty."""
        measured: dict[float, list[Round]] = {}

        def probe(rate: float) -> bool:
            requests = probe_requests(rate, self.slo, tolerance)
            needed, rounds = probe_rounds(requests, self.slo), list[Round]()
            while not rounds or not is_decided(rounds, self.slo, needed):
                rounds.append(self._round(rate, requests, len(rounds)))
            measured[rate] = rounds
            return bool(is_within(rounds, self.slo))

        def confirm(rate: float) -> bool:
            requests = probe_requests(rate, self.slo, tolerance)
            number = MAX_PROBE_ROUNDS if requests / rate <= 30 else max(2, probe_rounds(requests, self.slo))
            measured[rate] = [self._round(rate, requests, each) for each in range(number)]
            return bool(is_within(measured[rate], self.slo))

        search = LoadSearch.between((self.capacity / 10, self.capacity * 4), tolerance)
        search.run(probe, confirm, lambda: True, "")
        rate = search.maximum
        if rate is None:
            return 0.0, 0.0
        lower = {each: rounds for each, rounds in measured.items() if is_within(rounds, self.slo)}
        arrivals = arrivals_uncertainty(rate, measured[rate], lower, self.slo, tolerance) or 0.0
        return rate, hypot(search.uncertainty or 0.0, arrivals)

    def endless_maximum(self) -> float:
        """Return the maximum load of an endless load."""
        draw = random.Random(1)
        gaps = [draw.expovariate(1.0) for _ in range(ENDLESS)]
        low, high = self.capacity / 20, self.capacity
        for _ in range(12):
            rate, at_s, offsets_s = (low + high) / 2, 0.0, []
            for gap in gaps:
                at_s += gap / rate
                offsets_s.append(at_s)
            good = sum(wait_s <= self.limit_s for wait_s in self.waits_s(offsets_s))
            low, high = (rate, high) if good >= self.slo.attainment * ENDLESS else (low, rate)
        return low

    def search(self, scratch: Path, tolerance: float, bounds: tuple[float, float]) -> dict[str, object]:
        """Run the search as a test of pytest; return its curve."""
        slo = {"ttft": self.slo.ttft_s, "attainment": self.slo.attainment, "seed": self.seed}
        given = {"low": bounds[0], "high": bounds[1], "tolerance": tolerance, "budget": 3600}
        (scratch / "test_max_load.py").write_text(dedent(TEST.format(**slo, **given)))
        program = ROOT / "tests" / "backends" / "servers" / "queueing.py"
        settings = f"slots={self.slots} service={self.service_s}"
        command = f"{shlex.join([sys.executable, str(program)])} {{port}} {settings}"
        options = ["--energy-report", "--energy-backend=server", f"--energy-server={command}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, "--energy-rounds=2", "--energy-budget=1"],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        report = json.loads((scratch / "energy.json").read_text())
        curve: dict[str, object] = report["records"][0]["load_curve"]
        return curve


def main() -> None:
    """Print a line for each search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--ttft", type=float, default=0.3, help="limit in seconds")
    parser.add_argument("--attainment", type=float, default=0.99)
    parser.add_argument("--calculated", action="store_true", help="calculate the searches, too")
    parser.add_argument(
        "--long", action="store_true", help="one search with a limit of 5 s, from 0.9 to 1.1 of the capacity"
    )
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    if args.calculated:
        calculate(args.seeds, args.tolerance, args.attainment, is_markdown=args.markdown)
        return
    bar = _print_heads(
        ("capacity", "limit", "seed", "true maximum", "found", "exceeded at", "difference", "loads"),
        is_markdown=args.markdown,
    )
    servers = ((2, 0.1),) if args.long else SERVERS
    seeds, limit_s = (1, 5.0) if args.long else (args.seeds, args.ttft)
    differences = []
    for slots, service_s in servers:
        for seed in range(seeds):
            case = Case(slots, service_s, Slo(ttft_s=limit_s, attainment=args.attainment), seed)
            true = case.true_maximum(args.tolerance)
            factors = (0.9, 1.1) if args.long else (1 / 8, 3)
            with tempfile.TemporaryDirectory() as scratch:
                bounds = (case.capacity * factors[0], case.capacity * factors[1])
                curve = case.search(Path(scratch), args.tolerance, bounds)
            found, above = curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]
            points = curve["points"]
            assert isinstance(points, list)
            shares = ["-", "-", "-"]
            if isinstance(found, float) and isinstance(above, float):
                differences.append(found / true - 1)
                shares = [f"{found:.2f}", f"{above:.2f}", f"{differences[-1]:+.1%}"]
            cells = [
                f"{case.capacity:g}",
                f"{limit_s:g} s",
                str(seed),
                f"{true:.2f}",
                *shares,
                str(len(points)),
            ]
            print(bar.join(cells), flush=True)
    worst = max(map(abs, differences), default=float("nan"))
    print(f"\n{len(differences)} of {len(servers) * seeds} found, largest difference {worst:.1%}")


def calculate(seeds: int, tolerance: float, attainment: float, *, is_markdown: bool) -> None:
    """Compare calculated searches with endless loads, and with the capacity."""
    bar = _print_heads(
        ("slots", "service", "limit", "capacity", "endless", "found", "5 % too high", "u", "within 2 u"),
        is_markdown=is_markdown,
    )
    covered_of_all = 0
    for slots, service_s, limit_s in CALCULATED:
        case = Case(slots, service_s, Slo(ttft_s=limit_s, attainment=attainment), 0)
        endless = case.endless_maximum()
        made = [
            Case(slots, service_s, case.slo, 100 * number).calculated_search(tolerance)
            for number in range(seeds)
        ]
        rates = [rate for rate, _ in made]
        covered = sum(abs(rate - endless) <= 2 * u for rate, u in made)
        covered_of_all += covered
        cells = [
            str(slots),
            f"{service_s:g} s",
            f"{limit_s:g} s",
            f"{case.capacity:.3g}",
            f"{endless:.3g}",
            f"{min(rates):.3g} to {max(rates):.3g}",
            str(sum(rate > 1.05 * case.capacity for rate in rates)),
            f"{statistics.median(u / rate for rate, u in made):.0%}",
            f"{covered / seeds:.0%}",
        ]
        print(bar.join(cells), flush=True)
    print(f"\n{covered_of_all / seeds / len(CALCULATED):.0%} within twice the standard uncertainty")


def _print_heads(heads: Sequence[str], *, is_markdown: bool) -> str:
    bar = " | " if is_markdown else "  "
    print(bar.join(heads))
    if is_markdown:
        print("|".join(["---:"] * len(heads)))
    return bar


if __name__ == "__main__":
    main()
