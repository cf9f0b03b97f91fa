# SPDX-License-Identifier: Apache-2.0
"""Run all parts in sequence and write report.json, summary.md and pictures. Started by ``run.sh``.

Each part is a process with its own time limit. If one fails, hangs or dies, this is recorded and the next one
runs. Time that earlier parts leave unused goes to the last one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from . import machine, markdown, pictures
from .part import module_command, python_path, scratch
from .results import SCHEMA_VERSION, Machine, Part, Report, encode

#: Parts in order, and the seconds of each. Inference gets the remaining time.
PARTS = {
    "sensor": 85.0,
    "metering": 90.0,
    "visibility": 65.0,
    "sharing": 100.0,
    "workers": 70.0,
    "accuracy": 120.0,
    "generation": 75.0,
    "inference": 130.0,
    "user": 70.0,
}

#: Seconds in total: thirteen minutes less start-up and writing.
TOTAL_S = 770.0

#: Factor on all times in a dry run: its ranks share a few CPUs, and no borrowed machine waits.
DRY_FACTOR = 3.0

#: Seconds beyond its time limit after which a part that has not ended is terminated.
GRACE_S = 5.0


@dataclass
class Validation:
    """One validation: results so far and where they are written."""

    out: Path
    work: Path
    dry: bool
    total_s: float
    here: Machine = field(default_factory=machine.describe_machine)
    begin_s: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: _now())
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Passed on so that the parts need not query it again.
        os.environ[machine.CUDA_VARIABLE] = self.here.cuda or ""

    @property
    def left_s(self) -> float:
        """Return the seconds until everything must be done."""
        return self.begin_s + self.total_s - time.monotonic()

    def run(self, name: str, wanted_s: float) -> None:
        """Run one part in its own process."""
        given_s = min(wanted_s, self.left_s - GRACE_S)
        if given_s < 3.0:
            self.parts.append(_lost(name, "stopped", "out of time: not started", self.dry, given_s, 0.0))
            self.write(finished=False)
            return
        print(f"== {name}, {given_s:.0f} s", flush=True)
        begin_s = time.monotonic()
        options = ["--out", str(self.work), "--budget", f"{given_s:.1f}", *(["--dry"] if self.dry else [])]
        log = self.work / f"{name}.log"
        with log.open("wb") as to:
            started = subprocess.Popen(
                module_command(name, *options),
                env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
                stdout=to,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            how = _await(started, given_s + GRACE_S)
        output = log.read_text(errors="replace")
        print(output, end="", flush=True)
        try:
            self.parts.append(msgspec.json.decode((self.work / f"{name}.json").read_bytes(), type=Part))
        except (OSError, msgspec.MsgspecError):
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            taken_s = time.monotonic() - begin_s
            self.parts.append(_lost(name, "failed", f"{how}; {last}", self.dry, given_s, taken_s))
        self.write(finished=False)

    def write(self, *, finished: bool) -> Report:
        """Write all results so far, so that nothing is lost if this process is killed."""
        report = Report(
            schema_version=SCHEMA_VERSION,
            started_at=self.started_at,
            finished_at=_now() if finished else None,
            duration_s=round(time.monotonic() - self.begin_s, 1),
            dry=self.dry,
            machine=self.here,
            parts=self.parts,
        )
        _replace(self.out / "report.json", encode(report))
        _replace(self.out / "summary.md", markdown.summary(report).encode())
        terminals = sorted(self.work.glob("*/terminal.txt"))
        text = "".join(f"#### {path.parent.name}\n\n{path.read_text()}\n" for path in terminals)
        _replace(self.out / "terminal.txt", text.encode())
        return report

    def pack(self) -> None:
        """Pack logs, readings and reports into one archive, since some machines return only a few files."""
        with tarfile.open(self.work / ".details.tar.gz", "w:gz") as archive:
            for path in sorted(self.work.iterdir()):
                if not path.name.startswith("."):
                    archive.add(path, arcname=path.name)
        shutil.move(self.work / ".details.tar.gz", self.out / "details.tar.gz")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(content)
    fresh.replace(path)


def _await(started: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a part and stop it when its time is up. Returns how it ended."""
    try:
        return f"it ended with exit code {started.wait(timeout=limit_s)}"
    except subprocess.TimeoutExpired:
        how = "it did not finish in time and was killed"
    except BaseException:
        _end(started)
        raise
    _end(started)
    return how


def _end(started: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(timeout=2.0)


def _lost(name: str, status: str, reason: str, dry: bool, budget_s: float, taken_s: float) -> Part:
    return Part(
        name=name,
        status="failed" if status == "failed" else "stopped",
        reason=reason,
        dry=dry,
        budget_s=budget_s,
        duration_s=round(taken_s, 1),
    )


def main(argv: Sequence[str]) -> int:
    """Run the parts. Returns 1 if one of them failed or was stopped, 2 if all were skipped."""
    parser = argparse.ArgumentParser(prog="run.sh", description="Validate on the GPU of this machine.")
    parser.add_argument("--out", type=Path, default=Path("validation"), metavar="DIR", help="(validation)")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME[,NAME]", help="(all)")
    parser.add_argument(
        "--total", type=float, metavar="S", help=f"for all parts ({TOTAL_S:g}; three times that with --dry)"
    )
    parser.add_argument("--dry", action="store_true", help="run the parts without a GPU; validates nothing")
    args = parser.parse_args(argv)
    names = args.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with scratch("validation") as work:
        factor = DRY_FACTOR if args.dry else 1.0
        total_s = args.total if args.total is not None else factor * TOTAL_S
        validation = Validation(args.out.resolve(), work, args.dry, total_s)
        for name in names:
            last = name == names[-1]
            validation.run(name, validation.left_s if last else factor * PARTS[name])
        missing = pictures.draw(validation.parts, validation.out)
        report = validation.write(finished=True)
        validation.pack()
    if missing is not None:
        print(missing, flush=True)
    for part in report.parts:
        print(f"{part.name:12} {part.status:8} {part.reason or ''}")
    print(f"{validation.out}/summary.md", flush=True)
    states = {part.status for part in report.parts}
    return 2 if states == {"skipped"} else 1 if states & {"failed", "stopped"} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
