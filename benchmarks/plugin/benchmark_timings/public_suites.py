# SPDX-License-Identifier: Apache-2.0
"""Run public suites of pytest-benchmark with and without the plugin. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PLUGINS = ("in_turn", "simulated_counter")
FIGURES = ("min", "median", "mean")

PLAIN, MEASURED = ("-p", "no:llenergy"), ("--energy-report",)
COUNTER = (*MEASURED, "-p", "simulated_counter", "--energy-meter=simulated")


@dataclass(frozen=True)
class PublicSuite:
    """A suite in a source distribution.

    Attributes:
        source: Requirement whose source distribution has the suite.
        needs: Further requirements, installed without their dependencies.
        folder: Where pytest runs.
        arguments: What pytest runs.
        kind: What it shows.
    """

    source: str
    needs: tuple[str, ...]
    folder: str
    arguments: tuple[str, ...]
    kind: str


SUITES = {
    "python-rapidjson": PublicSuite(
        "python-rapidjson==1.25", (), "benchmarks", (), "parametrised calls of a C extension, hooks"
    ),
    "cattrs": PublicSuite(
        "cattrs==26.2.1",
        ("attrs", "typing_extensions", "orjson"),
        "bench",
        (),
        "parametrised calls in Python",
    ),
    "multidict": PublicSuite(
        "multidict==7.2.1",
        ("pytest-codspeed", "cffi", "rich"),
        "tests",
        ("test_watched_benchmarks.py", "test_views_benchmarks.py"),
        "decorators, set-up in pedantic, of pytest-codspeed's type",
    ),
    "aiohttp": PublicSuite(
        "aiohttp==3.14.5",
        (
            *("aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
            *("idna", "typing_extensions", "pytest-codspeed", "cffi", "rich", "trustme"),
        ),
        "tests",
        ("test_benchmarks_*.py",),
        "async servers and clients in an event loop, milliseconds",
    ),
    "psygnal": PublicSuite(
        "psygnal==0.16.1", (), ".", ("tests/test_bench.py",), "calls of compiled classes and callbacks"
    ),
    "deepdiff": PublicSuite(
        "deepdiff==9.1.0",
        ("cachebox<6", "orderly-set<6"),
        ".",
        ("tests/test_cache.py", "tests/test_lfucache.py"),
        "test classes, from microseconds to a second",
    ),
    "janus": PublicSuite(
        "janus==2.0.0", (), ".", ("tests/test_benchmarks.py",), "threads beside an event loop, up to seconds"
    ),
    "bitstring": PublicSuite(
        "bitstring==5.0.0",
        ("tibs<3",),
        "tests",
        ("test_benchmarks.py",),
        "long calls in Python, up to seconds",
    ),
}


class Side:
    """A pytest process that runs one test of a suite at a time on request."""

    def __init__(
        self, name: str, options: Sequence[str], suite: PublicSuite, tree: Path, scratch: Path
    ) -> None:
        self._out, self._log = scratch / f"{name}.json", scratch / f"{name}.txt"
        self._report = scratch / f"{name}-energy.json"
        self.seconds: list[float] = []
        child_turn, self._turn = os.pipe()
        self._done, child_done = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "in_turn"]
        command += ["-c", str(scratch / "pytest.ini"), f"--rootdir={tree}", f"--benchmark-json={self._out}"]
        options = [f"{each}={self._report}" if each in MEASURED else each for each in options]
        paths = (str(scratch), str(scratch / "site"), os.environ.get("PYTHONPATH"))
        environment = {
            **os.environ,
            "IN_TURN": f"1 {child_turn} {child_done}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # Leases of the sides, which run in turns.
            "LLENERGY_LOCK_DIR": str(scratch),
        }
        folder = tree / suite.folder
        # A pattern stands for the files that match it.
        arguments = [
            found
            for each in suite.arguments
            for found in (sorted(path.name for path in folder.glob(each)) if "*" in each else [each])
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *options, *arguments],
                cwd=folder,
                env=environment,
                pass_fds=(child_turn, child_done),
                stdout=log,
                stderr=log,
            )
        os.close(child_turn)
        os.close(child_done)

    def run_one(self) -> bool:
        """Run the next test. Returns False if there was none."""
        try:
            os.write(self._turn, b"\n")
        except BrokenPipeError:
            return False
        start_s = time.perf_counter()
        done = bool(os.read(self._done, 1))
        self.seconds.append(time.perf_counter() - start_s)
        return done

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each benchmark. Exits if the process failed."""
        self._process.wait()
        if not self._out.exists():
            raise SystemExit(f"pytest failed:\n{self._log.read_text()[-4000:]}")
        found = json.loads(self._out.read_text())["benchmarks"]
        return {each["fullname"]: each["stats"] for each in found}

    def records(self) -> list[tuple[str, str | None]]:
        """Return status and reason of each record."""
        records = json.loads(self._report.read_text())["records"] if self._report.exists() else []
        return [(each["status"], each["reason"]) for each in records]


def fetch(suite: PublicSuite, scratch: Path, add: bool) -> Path:
    """Download and unpack the source distribution, and install the package unless it is installed."""
    pip = [sys.executable, "-m", "pip", "-q"]
    # Not what it is built with.
    source = f"--no-binary={suite.source.partition('==')[0]}"
    subprocess.run([*pip, "download", "--no-deps", source, "--dest", str(scratch), suite.source], check=True)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(scratch / "source", filter="data")
    if add:
        site = ["--target", str(scratch / "site"), "--no-deps", suite.source, *suite.needs]
        subprocess.run([*pip, "install", *site], check=True)
    (tree,) = (scratch / "source").iterdir()
    return tree


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, float]:
    """Return how the second run of a suite differs from the first: medians over its benchmarks."""
    both = [name for name in first if name in second]
    result = {
        figure: median(second[name][figure] / first[name][figure] for name in both)
        for figure in (*FIGURES, "rounds", "iterations")
    }
    alike = [0.8 <= second[name]["iterations"] / first[name]["iterations"] <= 1.25 for name in both]
    result["same_iterations"] = sum(alike) / len(alike)
    return result


def run_suite(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a suite: without the plugin twice, and with it, one test at a time in changing order."""
    suite = SUITES[name]
    extra = [f"--benchmark-max-time={options.max_time}"] if options.max_time else []
    extra += ["-k", options.only] if options.only else []
    measured = COUNTER if options.counter else MEASURED
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        scratch = Path(folder)
        for plugin in PLUGINS:
            shutil.copy(HERE / f"{plugin}.py", scratch)
        (scratch / "pytest.ini").write_text("[pytest]\n")
        tree = fetch(suite, scratch, not options.installed)
        for pair in range(options.pairs):
            kinds = {"without": PLAIN, "again": PLAIN, "with": measured}
            sides = {kind: Side(kind, [*extra, *each], suite, tree, scratch) for kind, each in kinds.items()}
            order = list(sides.values())
            while all(list(map(Side.run_one, order))):
                order = [*order[1:], order[0]]
            stats = {kind: side.stats() for kind, side in sides.items()}
            seconds = {kind: sum(side.seconds[1:]) for kind, side in sides.items()}
            records = sides["with"].records()
            pairs.append(
                {
                    "benchmarks": len(stats["without"]),
                    "with": compare(stats["without"], stats["with"]),
                    "again": compare(stats["without"], stats["again"]),
                    "wall": seconds["with"] / seconds["without"],
                    "wall_again": seconds["again"] / seconds["without"],
                    "added_s": (seconds["with"] - seconds["without"]) / max(1, len(stats["without"])),
                    "records": len(records),
                    "measured": sum(status == "measured" for status, _ in records),
                    "reasons": sorted({reason for _, reason in records if reason}),
                }
            )
            print(f"  {name}: pair {pair + 1} of {options.pairs}", flush=True)
    return {"kind": suite.kind, "source": suite.source, "pairs": pairs}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Render the table: medians over the pairs, and in brackets of two runs without the plugin."""
    titles = (
        "suite",
        "benchmarks",
        "measured",
        "same iterations",
        "rounds",
        *FIGURES,
        "wall time",
        "s a test",
    )
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
    for name, result in results.items():
        pairs = result["pairs"]

        def both(figure: str, pairs: list[dict[str, Any]] = pairs) -> str:
            with_, again = (median(pair[side][figure] for pair in pairs) for side in ("with", "again"))
            return f"{with_:.3f} ({again:.3f})"

        measured = sum(pair["measured"] for pair in pairs) / max(1, sum(pair["records"] for pair in pairs))
        wall, wall_again = (median(pair[key] for pair in pairs) for key in ("wall", "wall_again"))
        cells = [
            name,
            str(pairs[0]["benchmarks"]),
            f"{measured:.0%}",
            both("same_iterations"),
            both("rounds"),
        ]
        cells += [both(figure) for figure in FIGURES]
        cells += [f"{wall:.2f} ({wall_again:.2f})", f"{median(pair['added_s'] for pair in pairs):+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Run the suites, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", choices=SUITES, help="a suite (all)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("--max-time", type=float, metavar="S", help="pytest-benchmark's time per test")
    parser.add_argument("--only", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--counter", action="store_true", help="measure with a simulated counter of 100 ms")
    parser.add_argument("--installed", action="store_true", help="the suites' packages are installed")
    parser.add_argument("--json", type=Path, default=Path("suites.json"), metavar="FILE")
    args = parser.parse_args(argv)
    results = {name: run_suite(name, args) for name in args.suite or SUITES}
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{markdown(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
