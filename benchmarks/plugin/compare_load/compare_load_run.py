# SPDX-License-Identifier: Apache-2.0
"""Measure time and memory of a comparison. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec

from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import DomainEnergy, Record, Round, Tokens
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.store import write_report
from tests.record.reports import RECORD, REPORT

#: Limits for loading and comparing 10,000 records of 12 rounds: CPU seconds and MB.
MAX_S, MAX_MB = 2.0, 500.0

#: Runs in a separate process; prints seconds of each step and the peak resident memory in MB.
COMPARISON_SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from pytest_llenergy.compare.comparison import Criterion, compare_reports
from pytest_llenergy.report.store import read_report
started, cpu = time.perf_counter(), time.process_time()
base, head = (read_report(Path(name), lean=True) for name in sys.argv[1:])
loaded, cpu_loaded = time.perf_counter(), time.process_time()
compared = compare_reports(base, head, ("base", "head"), [Criterion(gated=True)])
done, cpu_done = time.perf_counter(), time.process_time()
memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
measured = {"load_s": loaded - started, "compare_s": done - loaded, "memory_mb": memory_mb,
        "load_cpu_s": cpu_loaded - cpu, "compare_cpu_s": cpu_done - cpu_loaded}
assert len(compared.comparisons) == len(base.records)
print(json.dumps(measured))
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000, metavar="N", help="records per report (5,000)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="rounds per record (12)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repeats in fresh processes (3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("compare_load.json"), metavar="FILE")
    return parser.parse_args(argv)


def make_report(name: str, records: int, rounds: int, factor: float, random: Random) -> Report:
    """Return a report like that of a suite on the CPU, with noise of 1 %."""
    return msgspec.structs.replace(
        REPORT,
        run=msgspec.structs.replace(REPORT.run, id=name, complete=True),
        records=[_make_record(index, rounds, factor, random) for index in range(records)],
    )


def _make_record(index: int, rounds: int, factor: float, random: Random) -> Record:
    joules = [10.0 * factor * random.gauss(1.0, 0.01) for _ in range(rounds)]
    made = [
        Round(
            start_s=100.0 + place,
            duration_s=2.0,
            energy_j=each,
            energy_u_j=0.01,
            energy_u_absolute_j=0.5,
            iterations=2,
            idle_power_w=3.0,
            idle_power_u_w=0.1,
            by_domain={"cpu:package-0": DomainEnergy(energy_j=each, energy_u_j=0.01, kind="measured")},
            tokens=Tokens(input=30, output=64),
            requests=2,
            time_to_first_token_s=0.01,
            inter_token_latency_s=0.02,
        )
        for place, each in enumerate(joules)
    ]
    name = f"benchmarks/test_decode.py::test_decode[{index}]"
    return msgspec.structs.replace(
        RECORD,
        id=name,
        params={"i": index},
        rounds=made,
        windows=[],
        flags=[],
        metrics=compute_metrics(made, None),
    )


def run_command(command: Sequence[str]) -> dict[str, Any]:
    """Return wall and CPU seconds of a command, the peak memory of all children so far, and the output."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mb": after.ru_maxrss / 1024, "out": done.stdout}


def main(argv: Sequence[str]) -> int:
    """Run the comparison, print and write the results. Returns 1 if a limit is exceeded."""
    args = parse_arguments(argv)
    random = Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        base, head = Path(directory, "base.json"), Path(directory, "head.json")
        write_report(make_report("base", args.records, args.rounds, 1.0, random), base)
        write_report(make_report("head", args.records, args.rounds, 1.01, random), head)
        sizes_mb = [path.stat().st_size / 2**20 for path in (base, head)]
        parts = [
            json.loads(run_command([sys.executable, "-c", COMPARISON_SCRIPT, str(base), str(head)])["out"])
            for _ in range(args.repeats)
        ]
        command = [sys.executable, "-m", "pytest_llenergy.cli", "compare", str(base), str(head)]
        whole = [run_command([*command, "--format", "json"]) for _ in range(args.repeats)]
    best = min(parts, key=lambda each: each["load_cpu_s"] + each["compare_cpu_s"])
    figures = {
        "records": args.records,
        "rounds": args.rounds,
        "files_mb": sizes_mb,
        **{name: best[name] for name in ("load_s", "load_cpu_s", "compare_s", "compare_cpu_s")},
        "memory_mb": max(each["memory_mb"] for each in parts),
        "command_wall_s": min(each["wall_s"] for each in whole),
        "command_cpu_s": min(each["cpu_s"] for each in whole),
        "command_memory_mb": max(each["memory_mb"] for each in whole),
    }
    args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    kept = best["load_cpu_s"] + best["compare_cpu_s"] < MAX_S and figures["memory_mb"] < MAX_MB
    print("promise kept" if kept else f"limits: {MAX_S:g} s and {MAX_MB:g} MB")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
