# SPDX-License-Identifier: Apache-2.0
"""One run of pytest of the soak test: start it, disturb it, and check what it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pytest_llenergy.report.store import find_journals, read_report

from ..conformance.tiny import BACKEND, HOOK
from ..conftest import TEN_WATTS
from ..ranks.no_torch import without_torch
from ..ranks.survivors import MARKER, await_none, survivors

HERE = Path(__file__).parent

INI = """
[pytest]
energy_rounds = 2
energy_warmup = 0
energy_budget = 0.1
energy_model = random:llama-tiny
filterwarnings =
    default
"""

#: How long processes may survive their pytest before it counts as a leak (seconds); docs give the figures.
SURVIVAL_LIMIT_S = 60.0
#: How long a run may take to end after it was disturbed (seconds).
END_LIMIT_S = 120.0


@dataclass(frozen=True)
class Setting:
    """How a run is set up: start method, two workers of pytest-xdist or none, and real torch or boards."""

    method: str
    xdist: bool
    torch: bool
    #: Whether to leave out tests that end the supervisor.
    calm: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        """Draw a setting. Real torch is rare, since its ranks take seconds to start."""
        return cls(rng.choice(["spawn", "forkserver"]), rng.random() < 0.4, rng.random() < 0.2)

    @property
    def name(self) -> str:
        words = (self.method, "-n 2" if self.xdist else "alone", "torch" if self.torch else "boards")
        return ", ".join((*words, "calm") if self.calm else words)


@dataclass
class Run:
    """A running pytest."""

    mark: str
    directory: Path
    locks: Path
    tests: int
    process: subprocess.Popen[bytes]
    #: Closed and removed when the run has ended: open files by path.
    hostile: dict[Path, int] = field(default_factory=dict)

    def descendants(self, name: str) -> list[int]:
        """Return the pids of a kind of process of this run: worker, guard, supervisor, or rank."""
        with suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children()
            workers = [each for each in found if "stdin.readline" in " ".join(each.cmdline())]
            generations = {"worker": workers}
            parents = workers or [psutil.Process(self.process.pid)]
            for kind in ("guard", "supervisor", "rank"):
                parents = [
                    child
                    for each in parents
                    for child in each.children()
                    if kind != "guard" or "ranks.supervisor" in " ".join(child.cmdline())
                ]
                generations[kind] = parents
            return [each.pid for each in generations[name]]
        return []

    def output(self) -> str:
        """Return what it has printed."""
        return (self.directory / "output.txt").read_text(errors="replace")

    def finished(self) -> list[dict[str, Any]]:
        """Return what the conftest has logged about finished tests."""
        return read_lines(self.directory / "finished.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; empty without one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_run(
    directory: Path,
    setting: Setting,
    environment: Mapping[str, str],
    *,
    mark: str,
    seed: int,
    tests: int,
    until_s: float,
) -> Run:
    """Start pytest in a new directory.

    Args:
        directory: Created, and holds everything that the run writes.
        setting: How the run is set up.
        environment: Its environment, with the boards of the stand-in.
        mark: Marker of its processes.
        seed: Decides which tests run, in which order.
        tests: How many.
        until_s: When the run ends by itself (seconds since the epoch).
    """
    directory.mkdir()
    shutil.copy(HERE / "inner_tests.py", directory / "test_random.py")
    conftest = (HERE / "inner_conftest.py").read_text()
    (directory / "conftest.py").write_text("\n".join([conftest, TEN_WATTS, HOOK]))
    (directory / "tiny_backend.py").write_text(BACKEND)
    (directory / "pytest.ini").write_text(INI)
    if not setting.torch:
        without_torch(directory)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--energy-report"]
    command += [f"--energy-start-method={setting.method}", "--energy-backend=tiny", "--energy-timeout=60"]
    command += ["--energy-lease-timeout=300", *(["-n2"] if setting.xdist else [])]
    given = {
        **environment,
        MARKER: mark,
        "SOAK_LOGS": str(directory),
        "SOAK_SEED": str(seed),
        "SOAK_TESTS": str(tests),
        "SOAK_REPEATS": str(1 + tests // 40),
        "SOAK_UNTIL": str(until_s),
        "SOAK_CALM": "yes" if setting.calm else "",
        "SOAK_LEAKS": environment.get("SOAK_LEAKS", ""),
    }
    if setting.torch:
        for name in ("LD_LIBRARY_PATH", "NVML_SIM_WORLD"):
            given.pop(name, None)
    with (directory / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Run(mark, directory, Path(environment["LLENERGY_LOCK_DIR"]), tests, process)


def _signal_group(number: int, times: int = 1, pause_s: float = 0.2) -> Callable[[Run, random.Random], None]:
    def disturb(run: Run, rng: random.Random) -> None:
        for _ in range(times):
            with suppress(ProcessLookupError):
                os.killpg(run.process.pid, number)
            if times > 1:
                time.sleep(rng.uniform(0, 2 * pause_s))

    return disturb


def _kill(*names: str) -> Callable[[Run, random.Random], None]:
    def disturb(run: Run, rng: random.Random) -> None:
        victims = [run.descendants(name) for name in names]
        if all(victims):
            chosen = rng.randrange(min(map(len, victims)))
            for pids in victims:
                with suppress(ProcessLookupError):
                    os.kill(pids[chosen], signal.SIGKILL)

    return disturb


def _kill_pytest(run: Run, rng: random.Random) -> None:
    run.process.kill()


def _kill_everything(run: Run, rng: random.Random) -> None:
    """Kill all processes at once, as a loss of power would: nobody is left to clean up."""
    for pid in survivors(run.mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _freeze(run: Run, rng: random.Random) -> None:
    with suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.killpg(run.process.pid, signal.SIGCONT)


def _write_hostile_files(run: Run, rng: random.Random) -> None:
    """Fill the lock directory with what another user might write; the driver keeps these files locked."""
    contents = (b"[" * 100_000, b"\xff\xfe", b'{"pid": 1e300}', b"", b"x" * 5_000_000)
    for content in contents:
        path = run.locks / f"llenergy-{rng.randbytes(8).hex()}.holder"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, content)
        run.hostile[path] = descriptor


def _leave_alone(run: Run, rng: random.Random) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Disturbance:
    """Something that happens to a run, and the exit codes with which the run may end.

    With ``may_fail`` tests may fail that would pass in an undisturbed run.
    """

    act: Callable[[Run, random.Random], None]
    exit_codes: tuple[int, ...]
    may_fail: bool = False
    only_xdist: bool = False


#: pytest ends with 2 after Ctrl-C, and with 0 or 1 if its tests had ended before.
_ENDS = (0, 1, 2)

DISTURBANCES: dict[str, Disturbance] = {
    "none": Disturbance(_leave_alone, (0,)),
    "Ctrl-C": Disturbance(_signal_group(signal.SIGINT), _ENDS, may_fail=True),
    "Ctrl-C twice": Disturbance(_signal_group(signal.SIGINT, 2), (*_ENDS, 3, -2), may_fail=True),
    "SIGTERM": Disturbance(_signal_group(signal.SIGTERM), (0, 1, -15), may_fail=True),
    "SIGKILL of pytest": Disturbance(_kill_pytest, (0, 1, -9), may_fail=True),
    "SIGKILL of a worker": Disturbance(_kill("worker"), (0, 1), may_fail=True, only_xdist=True),
    "SIGKILL of a rank": Disturbance(_kill("rank"), (0, 1), may_fail=True),
    "SIGKILL of a supervisor": Disturbance(_kill("supervisor"), (0, 1), may_fail=True),
    "SIGKILL of a guard": Disturbance(_kill("guard"), (0, 1), may_fail=True),
    "SIGKILL of guard and supervisor": Disturbance(_kill("guard", "supervisor"), (0, 1), may_fail=True),
    "SIGKILL of everything": Disturbance(_kill_everything, (0, 1, -9), may_fail=True),
    "hostile files in the lock directory": Disturbance(_write_hostile_files, (0,)),
    "SIGSTOP for 3 s": Disturbance(_freeze, (0, 1), may_fail=True),
}


@dataclass
class Ended:
    """How a run ended: what was measured of it, and the findings, of which there should be none."""

    name: str
    setting: str
    exit_code: int | None
    tests: int
    end_s: float
    survival_s: float
    findings: list[str] = field(default_factory=list)


def finish_run(run: Run, name: str, setting: Setting, *, limit_s: float) -> Ended:
    """Wait for the end of a run, and check its exit code, processes, report and journal."""
    allowed = DISTURBANCES[name]
    start = time.monotonic()
    findings = []
    try:
        code: int | None = run.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
        findings.append(f"did not end within {limit_s:g} s")
        _kill_everything(run, random.Random(0))
        run.process.wait()
    ended = time.monotonic()
    for path, descriptor in run.hostile.items():
        path.unlink(missing_ok=True)
        os.close(descriptor)
    left = await_none(run.mark, SURVIVAL_LIMIT_S)
    survival_s = time.monotonic() - ended
    findings += [f"left alive: {command}" for command in left.values()]
    # A signal that comes before pytest handles it ends the interpreter as any other program.
    unstarted = code in (-signal.SIGINT, 1) and "test session" not in run.output() and not run.finished()
    if code is not None and code not in allowed.exit_codes and not (allowed.may_fail and unstarted):
        findings.append(f"exit code {code}")
    findings += _check_tests(run, may_fail=allowed.may_fail)
    findings += _check_records(run)
    output = run.output()
    if "INTERNALERROR" in output:
        findings.append("INTERNALERROR: " + _last_line_with(output, "INTERNALERROR"))
    result = Ended(name, setting.name, code, len(run.finished()), ended - start, survival_s, findings)
    if findings:
        findings.append(f"see {run.directory}")
    return result


def _last_line_with(text: str, word: str) -> str:
    return [line for line in text.splitlines() if word in line][-1]


def _check_tests(run: Run, *, may_fail: bool) -> list[str]:
    if may_fail:
        return []
    return [
        f"{entry['id']} {entry['outcome']}: {entry['message'].strip().splitlines()[-1:]}"
        for entry in run.finished()
        if entry["outcome"] == "failed"
    ]


def _check_records(run: Run) -> list[str]:
    """Check that no record of a finished test is lost, and that only a whole run is complete."""
    path = run.directory / "energy.json"
    wanted = {entry["id"] for entry in run.finished() if entry["recorded"]}
    kept: set[str] = set()
    for each in [*([path] if path.exists() else []), *find_journals(path)]:
        report = read_report(each)
        kept |= {record.id for record in report.records}
        had_their_turn = {entry["id"] for entry in run.finished()}
        if report.run.complete and len(had_their_turn) < run.tests:
            return [f"{each.name} is complete, but the run is not"]
    lost = wanted - kept
    return [f"{len(lost)} of {len(wanted)} records are lost, such as {min(lost)}"] if lost else []
