# SPDX-License-Identifier: Apache-2.0
"""Run a test suite in pytest's process and with a process for each test, and compare the outcomes.

Usage: ``python isolation_run.py DIRECTORY [pytest arguments]``, where DIRECTORY contains the suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def run(directory: str, arguments: Sequence[str], isolated: bool) -> tuple[dict[str, list[str]], float]:
    """Return what each phase of each test ended with, by node id, and the seconds of the run."""
    with tempfile.TemporaryDirectory(prefix="isolation-") as scratch:
        found = Path(scratch, "outcomes.json")
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        variables = {"OUTCOMES": str(found), "PYTHONPATH": path, **({"ISOLATE_ALL": "1"} if isolated else {})}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "isolate_all", "-p", "no:cacheprovider"]
        start_s = time.perf_counter()
        with Path(f"isolation-{'isolated' if isolated else 'plain'}.log").open("w") as log:
            subprocess.run(
                [*command, *arguments], cwd=directory, env={**os.environ, **variables}, stdout=log, stderr=log
            )
        return json.loads(found.read_text()), time.perf_counter() - start_s


def main(argv: Sequence[str]) -> int:
    """Print the counts and every test whose outcomes differ. Returns 1 if there is one."""
    directory, *arguments = argv
    (plain, plain_s), (isolated, isolated_s) = (run(directory, arguments, each) for each in (False, True))
    for name, outcomes, seconds in (("in process", plain, plain_s), ("isolated", isolated, isolated_s)):
        counts = Counter(", ".join(each for each in one if "passed" not in each) for one in outcomes.values())
        listed = "; ".join(f"{n} {kind or 'passed'}" for kind, n in sorted(counts.items()))
        print(f"{name}: {len(outcomes)} tests in {seconds:.1f} s: {listed}")
    differ = sorted(each for each in plain.keys() | isolated.keys() if plain.get(each) != isolated.get(each))
    for each in differ:
        print(f"  {each}: {plain.get(each)} in process, {isolated.get(each)} isolated")
    print(f"{len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
