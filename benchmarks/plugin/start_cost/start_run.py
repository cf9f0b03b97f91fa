# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of starting ranks and of using them again. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, ProcessPlan, plan_processes
from pytest_llenergy.ranks.workload import call_workload
from tests.nvml_sim import Board, World, build_library

SUITE = Path(__file__).with_name("suite")
AUTO = ("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto")
METHODS: tuple[StartMethod, ...] = ("spawn", "forkserver")
SUITES = {
    "workers, spawn": ("suite_plugin.py", "--energy-start-method=spawn"),
    "workers, forkserver": ("suite_plugin.py", "--energy-start-method=forkserver"),
    "a plain test in its own process": ("suite_isolated.py",),
    "a spawned process per test": ("suite_spawn.py", "-p", "no:llenergy"),
    "accelerate launch per test": ("suite_launch.py", "-p", "no:llenergy"),
}
BASE = "workers, spawn"

#: What a test costs more than an empty one, by the first word of its name, and the options of its run.
KINDS = {
    "second and later `workers` test of a file": ("test_workers",),
    "warm `backend` test": (
        "test_backend",
        "--energy-backend=transformers",
        "--energy-model=random:llama-tiny",
    ),
    "plain test with `gpus(1)`, in a process of its own": ("test_gpus",),
    "plain test with `gpus(1)` and `--energy-worker-gpus=1`": ("test_gpus", "--energy-worker-gpus=1"),
}

#: How long the parent is observed while ranks work (seconds).
OBSERVED_S = 2.0


def make_plan(n: int) -> ProcessPlan:
    """Return the plan of ranks with torch, or with transformers if they import it."""
    capabilities = Capabilities(framework="torch", data=True, preload=AUTO)
    return plan_processes(capabilities, None, Lease(("cpu",) * n), usable_cpus())


def import_libraries(with_transformers: bool) -> None:
    """Import what every rank needs first."""
    if with_transformers:
        from importlib import import_module

        for name in AUTO:
            import_module(name)


def measure_ready_s(host: LocalHost, n: int, with_transformers: bool) -> tuple[float, float]:
    """Return the seconds until cold ranks have imported what they need, and until warm ranks are ready."""
    start_s = time.perf_counter()
    group = RankGroup(make_plan(n), {LOCALHOST: host})
    try:
        call_ranks(group, import_libraries, with_transformers)
        first_s, again_s = time.perf_counter() - start_s, time.perf_counter()
        call_ranks(group, import_libraries, with_transformers)
        return first_s, time.perf_counter() - again_s
    finally:
        group.close()


def call_ranks(group: RankGroup, function: Any, *args: Any) -> None:
    """Call a function on every rank."""
    call_workload(group, function, args, {}, 120.0).run_round()


def measure_starts(repeats: int) -> dict[str, Any]:
    """Return medians in milliseconds by imports and number of ranks."""
    hosts = {method: LocalHost(method) for method in METHODS}
    times: dict[str, dict[str, list[float]]] = {}
    boot_s = []
    try:
        for _ in range(repeats):
            for n in (1, 2):
                # Forks of one server have the same number of threads, so that this starts another one.
                begin_s = time.perf_counter()
                measure_ready_s(hosts["forkserver"], n, False)
                boot_s.append(time.perf_counter() - begin_s)
                for with_transformers in (False, True):
                    name = f"torch{' and transformers' if with_transformers else ''}, {n} rank(s)"
                    row = times.setdefault(name, {})
                    for method in METHODS:
                        first_s, again_s = measure_ready_s(hosts[method], n, with_transformers)
                        row.setdefault(method, []).append(first_s * 1e3)
                        row.setdefault("reuse", []).append(again_s * 1e3)
                    row.setdefault("torchrun", []).append(measure_torchrun_ms(n, with_transformers))
            hosts["forkserver"].close()
        parent = measure_parent_percent(hosts["spawn"])
    finally:
        for host in hosts.values():
            host.close()
    return {
        "ms": {name: {how: median(each) for how, each in row.items()} for name, row in times.items()},
        "fork_server_ms": median(boot_s) * 1e3,
        "parent_percent": parent,
        "times_ms": times,
    }


def measure_parent_percent(host: LocalHost) -> float:
    """Return the CPU time of this process and the supervisor while two ranks sleep, in per cent of a core."""
    group = RankGroup(make_plan(2), {LOCALHOST: host})
    try:
        workload = call_workload(group, time.sleep, (OBSERVED_S,), {}, 120.0)
        workload.prepare_round()
        watched = [psutil.Process(), psutil.Process(psutil.Process(group.ranks[0].pid).ppid())]
        before = [sum(process.cpu_times()[:2]) for process in watched]
        workload.work()
        after = [sum(process.cpu_times()[:2]) for process in watched]
        return (sum(after) - sum(before)) / OBSERVED_S * 100
    finally:
        group.close()


def time_suite(*arguments: str) -> float:
    """Return the seconds of a whole pytest run. Exits if it fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    start_s = time.perf_counter()
    done = subprocess.run(command, cwd=SUITE, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - start_s


def time_suites(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each variant of the suite, run alternately."""
    times: dict[str, list[float]] = {name: [] for name in SUITES}
    for _ in range(repeats):
        for name, arguments in SUITES.items():
            times[name].append(time_suite(*arguments))
            print(f"  {name}: {times[name][-1]:.1f} s", flush=True)
    return times


def measure_torchrun_ms(n: int, with_transformers: bool) -> float:
    """Return the milliseconds until ranks of torchrun are ready."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={n}", str(SUITE / "ready.py"), *(AUTO if with_transformers else ())]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        if "ready" not in process.stdout.readline():
            raise SystemExit(f"{' '.join(command)} failed")
        return (time.perf_counter() - start_s) * 1e3


def measure_kinds_ms(repeats: int, scratch: Path) -> dict[str, float]:
    """Return what a warm test of each kind costs more than an empty one (medians, ms), on a simulated GPU."""
    world = World(scratch / "world", [Board()])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    environment = {**kept, **world.environment(build_library(scratch / "library").parent)}
    costs: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(repeats):
        for name, (kind, *options) in KINDS.items():
            report = scratch / "junit.xml"
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}"]
            # Includes set-up and teardown, where devices are leased and ranks cleaned.
            command += [
                "-o",
                "junit_duration_report=total",
                "suite_kinds.py",
                "-k",
                f"test_nothing or {kind}",
            ]
            done = subprocess.run(
                [*command, *options], cwd=SUITE, env=environment, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
            spent_ms: dict[bool, list[float]] = {True: [], False: []}
            for case in ElementTree.parse(report).iter("testcase"):
                spent_ms[case.attrib["name"].startswith(kind)].append(float(case.attrib["time"]) * 1e3)
            # The first one starts what the others share.
            costs[name].append(median(spent_ms[True][1:]) - median(spent_ms[False]))
    return {name: median(each) for name, each in costs.items()}


def markdown(content: dict[str, Any]) -> str:
    """Render the tables."""
    start = content["start"]
    lines = [
        "| until ready | spawn | forkserver | torchrun | warm ranks |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, row in start["ms"].items():
        cells = " | ".join(f"{row[how]:.4g} ms" for how in (*METHODS, "torchrun", "reuse"))
        lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        f"Fork server with its first rank: {start['fork_server_ms']:.0f} ms, once for a number of ranks. "
        f"Parent and supervisor while ranks work: {start['parent_percent']:.2f} % of a core.",
    ]
    if "suite" in content:
        base_s = median(content["suite"][BASE])
        lines += ["", "| 20 tests | whole run | relative to the first |", "| --- | ---: | ---: |"]
        for name, times in content["suite"].items():
            lines.append(f"| {name} | {median(times):.1f} s | {median(times) / base_s:.2f} |")
    lines += ["", "| test | more than an empty one |", "| --- | ---: |"]
    lines += [f"| {name} | {ms:.3g} ms |" for name, ms in content["kinds_ms"].items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Measure, print the tables, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="starts per kind (5)")
    parser.add_argument("--suites", type=int, default=1, metavar="N", help="runs per suite (1)")
    parser.add_argument("--json", type=Path, default=Path("start_cost.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    options = parser.parse_args(argv)
    content: dict[str, Any] = {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "load_average": os.getloadavg()[0],
    }
    with (
        tempfile.TemporaryDirectory(prefix="start-cost-") as locks,
        tempfile.TemporaryDirectory(prefix="start-cost-") as scratch,
    ):
        os.environ["LLENERGY_LOCK_DIR"] = locks
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
        content["kinds_ms"] = measure_kinds_ms(options.repeats, Path(scratch))
        content["start"] = measure_starts(options.repeats)
        if options.suites:
            content["suite"] = time_suites(options.suites)
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    tables = markdown(content)
    print(f"\n{tables}")
    if options.markdown:
        options.markdown.write_text(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
