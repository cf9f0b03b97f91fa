# SPDX-License-Identifier: Apache-2.0
"""Compare the errors of pytest-llenergy, Zeus, CodeCarbon and power polling. See the README."""

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
from typing import Any

import accuracy_world
from accuracy_figures import compute_all_errors, loops_markdown, markdown

from tests.nvml_sim import build_library

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import METERS, peer_python
from stand_in import cpu_seconds, make_environment, other_cores

HERE = Path(__file__).resolve().parent


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=32, metavar="N", help="bursts per duration (32)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the random rests (1)")
    parser.add_argument(
        "--peer-python", type=Path, metavar="PATH", help="use an existing environment of the peers"
    )
    parser.add_argument("--json", type=Path, default=Path("accuracy.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the errors as .svg or .png")
    return parser.parse_args(argv)


def run_workers(python: Path, scratch: Path, repeats: int, seed: int) -> dict[str, Any]:
    """Run one process per sensor, concurrently, since they mostly sleep."""
    library = build_library(scratch / "library")
    accuracy_world.provide_nvidia_smi(scratch / "bin")
    workers = {}
    for sensor in accuracy_world.SENSORS:
        out = scratch / sensor
        out.mkdir()
        script = str(HERE / "accuracy_worker.py")
        command = [str(python), script, sensor, str(library), str(out), str(repeats), str(seed)]
        with (out / "log").open("w") as log:
            workers[sensor] = subprocess.Popen(
                command, env=make_environment(scratch, library), cwd=out, stdout=log, stderr=subprocess.STDOUT
            )
    for sensor, worker in workers.items():
        if worker.wait() != 0:
            log_text = (scratch / sensor / "log").read_text()
            raise SystemExit(f"the worker of the {sensor} sensor failed:\n{log_text[-4000:]}")
    return {sensor: json.loads((scratch / sensor / "results.json").read_text()) for sensor in workers}


def main(argv: Sequence[str]) -> None:
    """Run the comparison, print the tables, write the files."""
    args = parse_arguments(argv)
    python = args.peer_python or peer_python(METERS)
    print("six to seven minutes with the default number of repeats", flush=True)
    before, begin_s = cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accuracy-") as directory:
        results = run_workers(python, Path(directory), args.repeats, args.seed)
    wall_s = time.monotonic() - begin_s
    found = compute_all_errors({sensor: each["bursts"] for sensor, each in results.items()})
    loops = compute_all_errors({sensor: each["loops"] for sensor, each in results.items()})
    content = {
        "world": {
            name: value
            for name, value in vars(accuracy_world).items()
            if name.isupper() and isinstance(value, int | float | tuple)
        },
        "repeats": args.repeats,
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "wall_s": wall_s,
        "cores_others_used": other_cores(before, wall_s),
        "figures": found,
        "loops": loops,
        "results": results,
    }
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    tables = f"{markdown(found)}\n{loops_markdown(loops)}"
    print(f"\n{tables}\n{wall_s:.0f} s; other processes used {content['cores_others_used']:.2f} cores")
    if args.markdown:
        args.markdown.write_text(tables)
    if args.picture:
        subprocess.run([python, HERE / "accuracy_picture.py", args.json, args.picture], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
