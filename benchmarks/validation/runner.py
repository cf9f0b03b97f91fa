# SPDX-License-Identifier: Apache-2.0
"""All parts, one after the other, into report.json, summary.md and pictures. ``run.sh`` starts it.

Each part is a process of its own with its own time. One that fails, hangs or dies is recorded as that, and
the next one runs. What an early part leaves of its time the last one has.
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

#: Parts in their order, and seconds of each. Inference has whatever is left.
PARTS = {
    "sensor": 50.0,
    "accuracy": 132.0,
    "beside": 44.0,
    "visibility": 58.0,
    "workers": 78.0,
    "user": 80.0,
    "inference": 86.0,
}

#: Seconds of everything: nine minutes, less what it takes to begin and to write.
TOTAL_S = 528.0

#: Dry runs have so many times more: their ranks share a few CPUs, and no lent machine waits.
DRY_FACTOR = 3.0

#: Seconds between asking a part to end and ending it.
GRACE_S = 5.0


@dataclass
class Validation:
    """One run: what is known of it so far, and where that goes."""

    out: Path
    work: Path
    dry: bool
    total_s: float
    here: Machine = field(default_factory=machine.machine)
    begin_s: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: _now())
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Parts need not ask again.
        os.environ[machine.CUDA_VARIABLE] = self.here.cuda or ""

    @property
    def left_s(self) -> float:
        """Seconds until all has to be done."""
        return self.begin_s + self.total_s - time.monotonic()

    def run(self, name: str, wanted_s: float) -> None:
        """One part, in a process of its own."""
        given_s = min(wanted_s, self.left_s - GRACE_S)
        if given_s < 3.0:
            self.parts.append(_lost(name, "stopped", "out of time: it was not begun", self.dry, given_s, 0.0))
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
        said = log.read_text(errors="replace")
        print(said, end="", flush=True)
        try:
            self.parts.append(msgspec.json.decode((self.work / f"{name}.json").read_bytes(), type=Part))
        except (OSError, msgspec.MsgspecError):
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            taken_s = time.monotonic() - begin_s
            self.parts.append(_lost(name, "failed", f"{how}; {last}", self.dry, given_s, taken_s))
        self.write(finished=False)

    def write(self, *, finished: bool) -> Report:
        """Everything so far: whoever ends this now has that."""
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
        """Logs, readings and reports of the parts in one file: little comes back from some machines."""
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
    """Wait for a part, and end it when its time is up; how it ended."""
    try:
        return f"it ended with exit code {started.wait(timeout=limit_s)}"
    except subprocess.TimeoutExpired:
        how = "it did not end in time and was killed"
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
        "--total", type=float, metavar="S", help=f"of all parts ({TOTAL_S:g}; three times that with --dry)"
    )
    parser.add_argument("--dry", action="store_true", help="try the parts without a GPU; validates nothing")
    given = parser.parse_args(argv)
    names = given.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    with scratch("validation") as work:
        factor = DRY_FACTOR if given.dry else 1.0
        total_s = given.total if given.total is not None else factor * TOTAL_S
        validation = Validation(given.out.resolve(), work, given.dry, total_s)
        for name in names:
            last = name == names[-1]
            validation.run(name, validation.left_s if last and name == "inference" else factor * PARTS[name])
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
