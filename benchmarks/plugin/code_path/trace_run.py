# SPDX-License-Identifier: Apache-2.0
"""Count how much of a plugin's code one measured test runs through. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median_low

#: Plugins by package, each with a test that measures the same call and its pytest options.
SUITES = {
    "pytest_llenergy": (
        "def test_sum(energy):\n    energy(sum, range(1000))\n",
        ["-p", "no:benchmark", "--energy-report=report.json", "--energy-rounds=3", "--energy-meter=estimate"],
    ),
    "pytest_benchmark": (
        "def test_sum(benchmark):\n    benchmark(sum, range(1000))\n",
        ["-p", "no:llenergy", "--benchmark-json=report.json", "--benchmark-max-time=0.2"],
    ),
}

#: Runs pytest under a profile hook in every thread; writes the calls as JSON to its second argument.
TRACED = """
import inspect, json, sys, threading
from pathlib import Path

package, target, *arguments = sys.argv[1:]
functions, calls = set(), set()

def place(frame):
    path = frame.f_code.co_filename
    before, found, inside = path.rpartition(f"/{package}/")
    return inside if found and inside.endswith(".py") else None

def is_import(frame):
    # The body of a module or class, or what an import calls, such as a decorator.
    while frame is not None:
        if place(frame) is not None and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return True
        frame = frame.f_back
    return False

def trace(frame, event, argument):
    if event != "call" or (file := place(frame)) is None:
        return
    function = file, frame.f_code.co_name, frame.f_code.co_firstlineno
    if function not in functions and is_import(frame):
        return
    functions.add(function)
    caller = frame.f_back
    while caller is not None and place(caller) is None:
        caller = caller.f_back
    if caller is not None and (origin := place(caller)) != file:
        calls.add((origin, caller.f_code.co_firstlineno, file, frame.f_code.co_firstlineno))

import pytest
threading.setprofile(trace)
sys.setprofile(trace)
status = pytest.main(arguments)
sys.setprofile(None)
Path(target).write_text(json.dumps({
    "files": len({file for file, *_ in functions}), "functions": len(functions),
    "calls_between_files": len(calls),
}))
sys.exit(int(status))
"""


def trace(package: str, python: str) -> dict[str, int]:
    """Run the suite of a package under the hook; return the counts of files, functions and calls."""
    source, arguments = SUITES[package]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_traced.py").write_text(source)
        (folder / "pytest.ini").write_text("[pytest]\nenergy_warmup = 0\nenergy_budget = 1\n")
        target = folder / "counts.json"
        command = [python, "-c", TRACED, package, str(target), "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the suite of {package} failed:\n{done.stdout}{done.stderr}")
        counts: dict[str, int] = json.loads(target.read_text())
    return counts


def size(root: Path) -> dict[str, int]:
    """Count the modules and lines of a package, and the modules at its top level."""
    lines = sorted(len(path.read_text().splitlines()) for path in root.rglob("*.py"))
    top = [path for path in root.glob("*.py") if path.name != "__init__.py"]
    return {
        "modules": len(lines),
        "lines": sum(lines),
        "median_lines": median_low(lines),
        "top_level_modules": len(top),
    }


def main() -> None:
    """Print one row per package, as a Markdown table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the plugins installed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = {}
    for package in SUITES:
        found = [options.python, "-c", f"import {package}; print({package}.__file__)"]
        origin = subprocess.run(found, capture_output=True, text=True, check=True, cwd="/").stdout.strip()
        rows[package] = size(Path(origin).parent) | trace(package, options.python)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    heads = list(next(iter(rows.values())))
    print("| package | " + " | ".join(head.replace("_", " ") for head in heads) + " |")
    print("| --- |" + " ---: |" * len(heads))
    for package, row in rows.items():
        print(f"| {package} | " + " | ".join(f"{row[head]:,}" for head in heads) + " |")


if __name__ == "__main__":
    main()
