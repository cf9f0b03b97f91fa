# SPDX-License-Identifier: Apache-2.0
"""Measure what a plugin costs a run that does not use it. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from pathlib import Path
from statistics import median
from typing import Any

#: Plugins by their names in pytest, with their distributions.
PLUGINS = {
    "llenergy": "pytest-llenergy",
    "benchmark": "pytest-benchmark",
    "pytest_energy_reporter": "pytest-energy-reporter",
}
NONE = "none"

FILES = 10
TESTS_A_FILE = 100
WORKLOADS = {
    f"pytest --co, {FILES * TESTS_A_FILE} tests": ["--co"],
    f"pytest, {FILES * TESTS_A_FILE} tests": [],
}

#: Modules that an idle run must not import.
HEAVY = {"torch", "transformers", "pynvml", "numpy", "matplotlib", "rich", "psutil", "msgspec"}

#: Resamples of the rounds, for the interval of a ratio.
RESAMPLES = 2000


@dataclass(frozen=True)
class Spent:
    """Time that one process took."""

    wall_s: float
    cpu_s: float


def write_suite(folder: Path) -> None:
    """Write a thousand tests that do nothing: half of them plain, half with a parameter."""
    half = TESTS_A_FILE // 2
    plain = "\n".join(f"def test_{index}() -> None:\n    assert True\n" for index in range(half))
    with_a_parameter = f'@pytest.mark.parametrize("n", range({half}))\ndef test_n(n):\n    assert n >= 0\n'
    text = f"import pytest\n\n{plain}\n{with_a_parameter}"
    for index in range(FILES):
        (folder / f"test_part_{index}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")


def command(plugin: str, installed: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the command of pytest with one of the plugins, or none. Other plugins are active in all runs."""
    blocked = [part for name in installed if name != plugin for part in ("-p", f"no:{name}")]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *blocked, *arguments]


def spend(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Spent:
    """Run one process. Raises ``SystemExit`` if it fails."""
    with (folder.parent / "output").open("w+b") as output:
        start_s = time.perf_counter()
        process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            raise SystemExit(f"{' '.join(arguments)} failed:\n{output.read().decode()[-4000:]}")
    return Spent(wall_s, usage.ru_utime + usage.ru_stime)


@contextmanager
def suite() -> Iterator[Path]:
    """Write the suite to a folder outside any project."""
    with tempfile.TemporaryDirectory(prefix="idle-cost-") as scratch:
        folder = Path(scratch) / "suite"
        folder.mkdir()
        write_suite(folder)
        yield folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the runs, in which compiled modules are cached, as for most users."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder.parent / "compiled")}


def imported(plugin: str, installed: Sequence[str], folder: Path) -> set[str]:
    """Return every module that a run of the suite imports."""
    note = folder.parent / "modules.json"
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    spied = {**environment(folder), "IDLE_SPY": str(note), "PYTHONPATH": paths}
    spend([*command(plugin, installed, []), "-p", "idle_spy"], folder, spied)
    return set(json.loads(note.read_text()))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return median(ratios), medians[RESAMPLES * 25 // 1000], medians[-RESAMPLES * 25 // 1000]


def measure(rounds: int, installed: Sequence[str], compared: Sequence[str]) -> dict[str, Any]:
    """Run each plugin and none in every round, in random order; runs of one round are compared."""
    order = [NONE, *compared]
    spent: dict[str, dict[str, list[Spent]]] = {work: {name: [] for name in order} for work in WORKLOADS}
    with suite() as folder:
        # These first runs compile what is imported.
        modules = {name: imported(name, installed, folder) for name in order}
        for index in range(rounds):
            for work, arguments in WORKLOADS.items():
                for name in random.Random(index).sample(order, len(order)):
                    run = command(name, installed, arguments)
                    spent[work][name].append(spend(run, folder, environment(folder)))
            print(f"  round {index + 1} of {rounds}", flush=True)
    return {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "rounds": rounds,
        "versions": {name: version(PLUGINS[name]) for name in compared} | {"pytest": version("pytest")},
        "modules": {name: sorted(modules[name] - modules[NONE]) for name in compared},
        "runs": {
            work: {
                name: [{"wall_s": one.wall_s, "cpu_s": one.cpu_s} for one in each]
                for name, each in row.items()
            }
            for work, row in spent.items()
        },
    }


def ratios(content: Mapping[str, Any], work: str, name: str, figure: str) -> tuple[float, float, float]:
    """Return the ratio with the plugin to without, of runs of the same round."""
    runs = content["runs"][work]
    pairs = zip(runs[name], runs[NONE], strict=True)
    return interval([mine[figure] / bare[figure] for mine, bare in pairs])


def markdown(content: Mapping[str, Any]) -> str:
    """Render the tables."""
    lines = []
    for work, runs in content["runs"].items():
        base = runs[NONE]
        lines += [
            f"{work}: {median(one['wall_s'] for one in base):.3f} s without any of them, "
            f"{median(one['cpu_s'] for one in base):.3f} s of CPU time; {len(base)} rounds.",
            "",
            "| idle plugin | wall time | CPU time | modules | heavy |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        for name, modules in content["modules"].items():
            cells = [
                "{:.3f} [{:.3f}–{:.3f}]".format(*ratios(content, work, name, figure))
                for figure in ("wall_s", "cpu_s")
            ]
            heavy = ", ".join(sorted(HEAVY & set(modules))) or "none"
            title = f"{PLUGINS[name]} {content['versions'][name]}"
            lines.append(f"| {title} | {' | '.join(cells)} | {len(modules)} | {heavy} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Measure, print the tables and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="runs of each kind (25)")
    parser.add_argument("--only", choices=PLUGINS, help="this plugin and none")
    parser.add_argument("--json", type=Path, default=Path("idle_cost.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    args = parser.parse_args(argv)
    found = {point.name for point in entry_points(group="pytest11")}
    installed = [name for name in PLUGINS if name in found]
    compared = [name for name in installed if args.only in (None, name)]
    for name in PLUGINS.keys() - found:
        print(f"not installed, so left out: {PLUGINS[name]}", file=sys.stderr)
    content = measure(args.rounds, installed, compared)
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    tables = markdown(content)
    print(f"\n{tables}")
    if args.markdown:
        args.markdown.write_text(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
