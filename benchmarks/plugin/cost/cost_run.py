# SPDX-License-Identifier: Apache-2.0
"""Measure what metering costs in pytest-llenergy, Zeus and CodeCarbon. See the README in this folder."""

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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cost_table import CODECARBON, OURS, READERS, ZEUS, markdown, speed_ratio

from tests.nvml_sim import build_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MAKE_PEERS = HERE.parent / "peer_environment.py"

TOOLS = (OURS, ZEUS, CODECARBON)
NUMBERS_OF_BOARDS = (1, 8)

IMPORTS = {
    "nothing": "pass",
    OURS: "import pytest_llenergy.energy",
    ZEUS: "from zeus.monitor import ZeusMonitor",
    CODECARBON: "import codecarbon",
}
#: Modules that are slow to import and that a meter does not need.
HEAVY = ("torch", "numpy", "sklearn", "scipy", "pandas", "transformers")

#: Loops whose speed is compared, and the number of boards read meanwhile (0: a control).
LOOPS = tuple((loop, number) for loop in ("python", "matrices") for number in (0, *NUMBERS_OF_BOARDS))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="fresh processes per figure (15)"
    )
    parser.add_argument(
        "--spans", type=int, default=60, metavar="N", help="metered spans of two seconds per loop (60)"
    )
    parser.add_argument(
        "--peer-python", type=Path, metavar="PATH", help="use an existing environment of the peers"
    )
    parser.add_argument("--json", type=Path, default=Path("cost.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument("--only", choices=("import", "construct", "window", "reader", "speed"), nargs="+")
    return parser.parse_args(argv)


def peer_python() -> Path:
    """Return the interpreter of the accuracy comparison's environment."""
    made = subprocess.run([sys.executable, str(MAKE_PEERS)], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


@dataclass(frozen=True)
class Lab:
    """Interpreter, boards and directory of the probe processes."""

    python: Path
    scratch: Path

    def run(self, *arguments: str) -> str:
        """Return the output of a process with the peers' interpreter. Exits if it fails."""
        library = build_library(self.scratch / "library")
        # Bytecode is cached, as for an installed package, but outside this checkout.
        dropped = ("CUDA_", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(self.scratch / "bytecode"),
            "LD_LIBRARY_PATH": str(library.parent),
            "PATH": f"{self.scratch / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.scratch),
            "LLENERGY_CACHE_DIR": str(self.scratch / "cache"),
            "LLENERGY_LOCK_DIR": str(self.scratch / "locks"),
        }
        command = [str(self.python), *arguments]
        done = subprocess.run(command, env=environment, cwd=self.scratch, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def probe(self, script: str, *arguments: str) -> Any:
        """Return the JSON on the last line of a script's output."""
        return json.loads(self.run(str(HERE / script), *arguments, str(self.scratch)).splitlines()[-1])

    def provide_nvidia_smi(self) -> None:
        """Put an nvidia-smi on PATH: CodeCarbon requires one to see NVIDIA boards."""
        program = self.scratch / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o755)


def measure_imports(lab: Lab, repeats: int) -> dict[str, Any]:
    """Measure the wall time of a fresh interpreter that imports a tool, and the imported modules."""
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for statement in IMPORTS.values():
        lab.run("-c", statement)  # warms the page cache, writes bytecode
    for _ in range(repeats):
        for name, statement in IMPORTS.items():
            start_s = time.perf_counter()
            lab.run("-c", statement)
            times[name].append((time.perf_counter() - start_s) * 1e3)
    bare_ms = median(times["nothing"])
    result: dict[str, Any] = {"bare_ms": bare_ms}
    for name in TOOLS:
        listing = f"{IMPORTS[name]}\nimport sys, json\nprint()\nprint(json.dumps(sorted(sys.modules)))"
        modules = json.loads(lab.run("-c", listing).splitlines()[-1])
        result[name] = {
            "over_bare_ms": median(times[name]) - bare_ms,
            "modules": len(modules),
            "heavy": [module for module in HEAVY if module in modules],
            "times_ms": times[name],
        }
    return result


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over fresh processes."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def run_probes(
    lab: Lab, what: str, tools: Sequence[str], numbers: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Return figures by number of boards and tool; the tools alternate."""
    result: dict[str, Any] = {}
    for number in numbers:
        runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
        for _ in range(repeats):
            for tool in tools:
                runs[tool].append(lab.probe("cost_probe.py", what, tool, str(number)))
        result[str(number)] = {tool: {**medians(each), "runs": each} for tool, each in runs.items()}
    return result


def measure_speed(lab: Lab, spans: int) -> list[dict[str, Any]]:
    """Measure the speed of a loop with metering over that without."""
    rows = []
    for loop, number in LOOPS:
        chunks_s = lab.probe("cost_speed.py", loop, str(number), str(spans))
        ratio, u_ratio = speed_ratio(chunks_s)
        rows.append(
            {"loop": loop, "boards": number, "ratio": ratio, "u_ratio": u_ratio, "chunks_s": chunks_s}
        )
        print(f"  {loop} loop, {number} board(s): {ratio:.4f} ± {u_ratio:.4f}", flush=True)
    return rows


def main(argv: Sequence[str]) -> None:
    """Run the measurements, print the tables, write the files."""
    args = parse_arguments(argv)
    wanted = args.only or ("import", "construct", "window", "reader", "speed")
    content: dict[str, Any] = {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    }
    with tempfile.TemporaryDirectory(prefix="cost-") as directory:
        lab = Lab(args.peer_python or peer_python(), Path(directory))
        lab.provide_nvidia_smi()
        # The first construction checks the boards; the result is cached for the others.
        lab.probe("cost_probe.py", "construct", OURS, str(max(NUMBERS_OF_BOARDS)))
        for what in wanted:
            print(what, flush=True)
            content["load_average"] = os.getloadavg()[0]
            if what == "import":
                content[what] = measure_imports(lab, args.repeats)
            elif what == "construct":
                content[what] = run_probes(lab, what, TOOLS, (8,), args.repeats)
            elif what == "window":
                content[what] = run_probes(lab, what, TOOLS, NUMBERS_OF_BOARDS, max(1, args.repeats // 5))
            elif what == "reader":
                content[what] = run_probes(lab, what, READERS, NUMBERS_OF_BOARDS, 1)
            else:
                content[what] = measure_speed(lab, args.spans)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    tables = markdown(content)
    print(f"\n{tables}")
    if args.markdown:
        args.markdown.write_text(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
