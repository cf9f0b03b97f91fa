# SPDX-License-Identifier: Apache-2.0
"""Run random tests for a long time while other runs come, are disturbed and go, and report what is left.

A *resident* run of pytest executes random tests until its time is up. Beside it, *visitors* of a few tests
use the same boards, leases and temporary directory, and each is interrupted, killed or frozen at a random
moment.
As a program: ``python -m tests.soak.driver --seconds 3600 --json soak.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..nvml_sim import Board, World, build_library
from ..ranks.survivors import marked
from .runs import DISTURBANCES, END_LIMIT_S, Ended, Run, Setting, finish_run, read_lines, start_run

#: Residents in turn. One that uses pytest-xdist and one that does not, with real torch and with boards.
RESIDENTS = (
    Setting("spawn", xdist=False, torch=False, calm=True),
    Setting("forkserver", xdist=True, torch=False),
    Setting("forkserver", xdist=False, torch=True, calm=True),
    Setting("spawn", xdist=True, torch=True),
)

VISITOR_TESTS = 6

#: A visitor is disturbed at a random moment of this time after its start (seconds).
DISTURBED_WITHIN_S = 8.0

#: How much a process may grow from the second to the last quarter of its samples, and a directory likewise:
#: open files, threads, descendants, entries; and memory for each test (bytes). pytest keeps the reports of
#: all tests, and the plugin their records until the report is written.
MAX_MORE, MAX_BYTES_A_TEST = 3, 100_000

#: Each quarter needs so many samples, or growth is not judged.
MIN_SAMPLES = 2

#: A soak test of so many seconds must be able to judge the growth of each of its residents.
JUDGED_FROM_S = 1200.0


@dataclass
class Soak:
    """The result of a soak test."""

    seconds: float
    seed: int
    residents: list[Ended] = field(default_factory=list)
    visitors: list[Ended] = field(default_factory=list)
    #: Tests of all runs by kind and outcome.
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    #: The longest test, and the longest wait for a lease (seconds), with their names.
    longest_test: tuple[float, str] = (0.0, "")
    longest_lease_wait: tuple[float, str] = (0.0, "")
    #: Growth of each process of pytest from the second to the last quarter of its samples.
    growth: list[dict[str, Any]] = field(default_factory=list)
    #: What is left in the end, and how much directories have grown.
    left: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def add(self, ended: Ended, run: Run, *, resident: bool) -> None:
        """Add a run that has ended."""
        (self.residents if resident else self.visitors).append(ended)
        self.findings += [f"{ended.name} ({ended.setting}): {each}" for each in ended.findings]
        for entry in run.finished():
            kind = re.sub(r"\[.*", "", entry["id"].rpartition("::")[2])
            counts = self.outcomes.setdefault(kind, {})
            outcome = (
                entry["outcome"] if entry["when"] == "call" else f"{entry['outcome']} in {entry['when']}"
            )
            counts[outcome] = counts.get(outcome, 0) + 1
            name = f"{entry['id']} ({ended.setting}, {ended.name})"
            self.longest_test = max(self.longest_test, (entry["duration_s"], name))
            self.longest_lease_wait = max(self.longest_lease_wait, (entry["lease_wait_s"] or 0.0, name))

    def add_samples(self, samples: Sequence[dict[str, Any]], setting: Setting) -> None:
        """Compare the second and the last quarter of the samples of each process."""
        by_process = defaultdict(list)
        for sample in samples:
            by_process[sample["role"], sample["pid"]].append(sample)
        for (role, _), each in by_process.items():
            # The process loads modules and fills caches at first.
            quarter = len(each) // 4
            if quarter < MIN_SAMPLES:
                continue
            first, last = each[quarter : 2 * quarter], each[-quarter:]
            names = ("tests", "fds", "threads", "processes", "memory_bytes")
            grown = {name: _median(last, name) - _median(first, name) for name in names}
            self.growth.append({"setting": setting.name, "role": role, **grown})
            where = f"{setting.name}: {role}"
            self.findings += [
                f"{where}: {grown[name]:g} more {name} after {grown['tests']:g} tests"
                for name in ("fds", "threads", "processes")
                if grown[name] > MAX_MORE
            ]
            if grown["memory_bytes"] > MAX_BYTES_A_TEST * max(grown["tests"], 100):
                self.findings.append(f"{where}: {grown['memory_bytes'] / 1e6:.1f} MB more memory")
        judged = any(each["setting"] == setting.name and each["role"] == "pytest" for each in self.growth)
        if self.seconds >= JUDGED_FROM_S and not judged:
            self.findings.append(f"{setting.name}: too few tests to judge growth")

    def add_files(self, counts: Sequence[dict[str, int]]) -> None:
        """Compare the second and the last quarter of the numbers of files."""
        quarter = len(counts) // 4
        if quarter < MIN_SAMPLES:
            return
        first, last = counts[quarter : 2 * quarter], counts[-quarter:]
        for name in counts[0]:
            grown = _median(last, name) - _median(first, name)
            self.left[f"growth of {name}"] = grown
            if grown > MAX_MORE:
                self.findings.append(f"{grown:g} more entries of {name}")


def _median(samples: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(sample[name] for sample in samples))


def soak(seconds: float, seed: int, root: Path, residents: Sequence[Setting] = RESIDENTS) -> Soak:
    """Run the soak test.

    Args:
        seconds: How long.
        seed: Decides settings, tests, disturbances and their moments.
        root: An empty directory for everything that is written.
        residents: Settings of the residents, which share the time.
    """
    rng, result = random.Random(seed), Soak(seconds, seed)
    # Background jobs of a shell ignore it, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("locks", "temporary", "cache", "runs"):
        (root / name).mkdir(mode=0o1777)
    library = build_library(root / "library")
    world = World(root / "world", [Board(name="NVIDIA H200"), Board(name="NVIDIA H200")])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTEST_"))},
        **world.environment(library.parent),
        "LLENERGY_LOCK_DIR": str(root / "locks"),
        "LLENERGY_CACHE_DIR": str(root / "cache"),
        "TMPDIR": str(root / "temporary"),
    }
    end_s = time.monotonic() + seconds
    fds_before = psutil.Process().num_fds()
    counts: list[dict[str, int]] = []
    for number, setting in enumerate(residents):
        share_s = (end_s - time.monotonic()) / (len(residents) - number)
        _soak_beside(setting, share_s, rng, root, environment, result, counts)
    result.add_files(counts)
    # The next start sweeps what killed runs have left.
    _visit(Setting("spawn", xdist=False, torch=False), "none", rng, root, environment, result)
    result.left["open files of the driver"] = psutil.Process().num_fds() - fds_before
    left = [path for path in (root / "temporary").iterdir() if not path.name.startswith("pytest-of-")]
    left += [path for path in (root / "locks").iterdir() if path.suffix != ".lock"]
    result.findings += [f"left in the end: {path}" for path in left]
    return result


def _soak_beside(
    setting: Setting,
    share_s: float,
    rng: random.Random,
    root: Path,
    environment: dict[str, str],
    result: Soak,
    counts: list[dict[str, int]],
) -> None:
    """Run one resident and, until it ends, visitors; count the files after each."""
    until_s = time.time() + share_s
    with marked() as mark:
        resident = start_run(
            root / "runs" / f"resident-{len(result.residents)}",
            setting,
            environment,
            mark=mark,
            seed=rng.randrange(1 << 30),
            # About as many as a second has tests, and then as many again.
            tests=round(8 * share_s) + 100,
            until_s=until_s,
        )
        while time.time() < until_s and resident.process.poll() is None:
            _visit(Setting.draw(rng), rng.choice(list(DISTURBANCES)), rng, root, environment, result)
            places = (root / "locks", root / "temporary", root / "cache", Path("/dev/shm"))
            counts.append({place.name: sum(1 for _ in place.iterdir()) for place in places})
        # Its last test ends first, and 2 is the exit code of a run that was stopped.
        ended = finish_run(resident, "none", setting, limit_s=END_LIMIT_S)
    ended.findings = [
        each for each in ended.findings if each != "exit code 2" and not each.startswith("see ")
    ]
    result.add(ended, resident, resident=True)
    result.add_samples(read_lines(resident.directory / "samples.jsonl"), setting)


def _visit(
    setting: Setting, name: str, rng: random.Random, root: Path, environment: dict[str, str], result: Soak
) -> None:
    """Start a visitor, disturb it, and wait for its end."""
    if DISTURBANCES[name].only_xdist:
        setting = Setting(setting.method, xdist=True, torch=setting.torch)
    directory = root / "runs" / f"visitor-{len(result.visitors)}"
    with marked() as mark:
        run = start_run(
            directory,
            setting,
            environment,
            mark=mark,
            seed=rng.randrange(1 << 30),
            tests=VISITOR_TESTS,
            until_s=time.time() + END_LIMIT_S,
        )
        moment_s = time.monotonic() + rng.uniform(0.0, DISTURBED_WITHIN_S)
        while time.monotonic() < moment_s and run.process.poll() is None:
            time.sleep(0.02)
        DISTURBANCES[name].act(run, rng)
        ended = finish_run(run, name, setting, limit_s=END_LIMIT_S + 300)
    result.add(ended, run, resident=False)
    if not ended.findings:
        shutil.rmtree(directory)


def render(result: Soak) -> str:
    """Return the result as Markdown."""
    visitors = defaultdict(list)
    for visitor in result.visitors:
        visitors[visitor.name].append(visitor)
    lines = [
        "|disturbance|runs|exit codes|longest until its end|longest until its last process ended|",
        "|---|---:|---|---:|---:|",
    ]
    for name, runs in visitors.items():
        codes = ", ".join(
            f"{code} × {n}" for code, n in sorted(Counter(str(e.exit_code) for e in runs).items())
        )
        end_s, survival_s = max(e.end_s for e in runs), max(e.survival_s for e in runs)
        lines.append(f"|{name}|{len(runs)}|{codes}|{end_s:.1f} s|{survival_s:.1f} s|")
    lines += ["", "|kind of test|outcomes|", "|---|---|"]
    for kind, counts in sorted(result.outcomes.items()):
        lines.append(f"|`{kind}`|{', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items()))}|")
    lines += ["", "|resident|tests|exit code|", "|---|---:|---:|"]
    lines += [f"|{run.setting}|{run.tests}|{run.exit_code}|" for run in result.residents]
    lines += ["", "|largest growth of|process|how many|open files|threads|descendants|memory|"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    alike = defaultdict(list)
    for grown in result.growth:
        alike[grown["setting"], grown["role"]].append(grown)
    for (setting, role), each in alike.items():
        numbers = "|".join(
            f"{max(grown[name] for grown in each):+g}" for name in ("fds", "threads", "processes")
        )
        memory = f"{max(grown['memory_bytes'] for grown in each) / 1e6:+.1f} MB"
        lines.append(f"|{setting}|{role}|{len(each)}|{numbers}|{memory}|")
    lines += [
        "",
        f"Longest test: {result.longest_test[0]:.1f} s, {result.longest_test[1]}. "
        f"Longest wait for a lease: {result.longest_lease_wait[0]:.1f} s, {result.longest_lease_wait[1]}.",
        "",
        *(f"{name}: {value}" for name, value in result.left.items()),
        "",
        *(f"FINDING: {each}" for each in result.findings),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the soak test from the command line. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--root", type=Path, help="directory that keeps everything (default: removed at the end)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.root or Path(scratch)
        root.mkdir(exist_ok=True)
        result = soak(args.seconds, args.seed, root)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(render(result))
    return bool(result.findings)


if __name__ == "__main__":
    sys.exit(main())
