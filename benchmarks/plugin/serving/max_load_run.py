# SPDX-License-Identifier: Apache-2.0
"""Search for the maximum load of servers of known capacity, and compare with what a calculation finds.

The server (tests/backends/servers/queueing.py) has slots that serve a request in a fixed time. The
calculation puts the same arrivals through such a queue, without a server, a client or a clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from textwrap import dedent

from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.measure.load_search import probe_requests
from pytest_llenergy.model.load_curve import Slo

ROOT = Path(__file__).resolve().parents[3]

#: Slots and seconds of service: capacities of 10, 20 and 40 requests per second.
SERVERS = ((1, 0.1), (4, 0.2), (4, 0.1))

#: Step of the rates that are calculated.
STEP = 1.0025

TOLERANCE = 0.05

TEST = """
    from pytest_llenergy import slo

    def test_it(energy, backend):
        energy.max_load(
            backend.serve, ["abc"], slo=slo(ttft={ttft}, attainment={attainment}), seed={seed},
            between=({low}, {high}), tolerance={tolerance}, max_new_tokens=2)
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

    def true_maximum(self, tolerance: float) -> float:
        """Return the rate above which the same arrivals do not meet the SLO, by calculation."""
        rate = self.capacity / 4
        while self._attainment(rate, tolerance) >= self.slo.attainment:
            rate *= STEP
        return rate / STEP

    def _attainment(self, rate: float, tolerance: float) -> float:
        requests = probe_requests(rate, self.slo, tolerance)
        params = ServeParams(request_rate=rate, num_requests=requests, seed=self.seed)
        free_s = [0.0] * self.slots
        good = 0
        for sent_s in params.offsets_s():
            begin_s = max(sent_s, heappop(free_s))
            heappush(free_s, begin_s + self.service_s)
            # The first token comes when the service begins.
            good += begin_s - sent_s <= (self.slo.ttft_s or 0.0)
        return good / requests

    def search(self, scratch: Path, tolerance: float) -> dict[str, object]:
        """Run the search as a test of pytest; return its curve."""
        slo = {"ttft": self.slo.ttft_s, "attainment": self.slo.attainment, "seed": self.seed}
        bounds = {"low": self.capacity / 8, "high": self.capacity * 3, "tolerance": tolerance}
        (scratch / "test_max_load.py").write_text(dedent(TEST.format(**slo, **bounds)))
        program = ROOT / "tests" / "backends" / "servers" / "queueing.py"
        settings = f"slots={self.slots} service={self.service_s}"
        command = f"{shlex.join([sys.executable, str(program)])} {{port}} {settings}"
        options = ["--energy-report", "--energy-backend=server", f"--energy-server-command={command}"]
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
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    heads = ("capacity", "seed", "true maximum", "found", "exceeded at", "difference", "loads")
    bar = " | " if args.markdown else "  "
    print(bar.join(heads))
    if args.markdown:
        print("|".join(["---:"] * len(heads)))
    differences = []
    for slots, service_s in SERVERS:
        for seed in range(args.seeds):
            case = Case(slots, service_s, Slo(ttft_s=args.ttft, attainment=args.attainment), seed)
            true = case.true_maximum(args.tolerance)
            with tempfile.TemporaryDirectory() as scratch:
                curve = case.search(Path(scratch), args.tolerance)
            found, above = curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]
            points = curve["points"]
            assert isinstance(points, list)
            shares = ["-", "-", "-"]
            if isinstance(found, float) and isinstance(above, float):
                differences.append(found / true - 1)
                shares = [f"{found:.2f}", f"{above:.2f}", f"{differences[-1]:+.1%}"]
            cells = [f"{case.capacity:g}", str(seed), f"{true:.2f}", *shares, str(len(points))]
            print(bar.join(cells), flush=True)
    worst = max(map(abs, differences), default=float("nan"))
    print(f"\n{len(differences)} of {len(SERVERS) * args.seeds} found, largest difference {worst:.1%}")


if __name__ == "__main__":
    main()
