# SPDX-License-Identifier: Apache-2.0
"""Part 5, workers: NCCL in a rank, the fork server with CUDA in torch, the doctor, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from statistics import median

import psutil

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.occupancy import read_memory_use
from pytest_llenergy.errors import DeviceError
from tests.ranks.survivors import MARKER, survivors

from .part import Notebook, main, need_board, need_cuda
from .session import (
    LLENERGY,
    load_report,
    make_environment,
    note_variables,
    pytest_command,
    read_notes,
    run_command,
)

BUDGET_S = 78.0

#: Processes that the kill tests kill, in turn.
VICTIMS = ("pytest", "supervisor", "pytest", "rank")

#: Seconds within which a killed run must be gone, and within which a test must start its work.
GONE_S, READY_S = 15.0, 40.0

#: Tolerated memory use of the board above the baseline: contexts of other processes come and go.
SLACK_BYTES = 64 << 20


def body(notebook: Notebook) -> None:
    """Check ranks, then the doctor, then kill runs for the rest of the time."""
    uuid: str | None = None
    if not notebook.dry:
        need_cuda()
        uuid = need_board()
    _check_ranks(notebook)
    _check_doctor(notebook)
    _kill_runs(notebook, uuid)


def _check_ranks(notebook: Notebook) -> None:
    """Start ranks by each method, with a process group and with measured work."""
    # One test per method with a slow start is enough.
    for method, which, tests in (("spawn", "exchange or multiply and 1", 2), ("forkserver", "", 3)):
        out, report = notebook.file(f"{method}.jsonl"), notebook.file(f"{method}.json")
        options = [f"--energy-start-method={method}", "--energy-isolation=test", f"--energy-report={report}"]
        quick = ["--energy-rounds=2", "--energy-budget=1", "--energy-warmup=1"]
        command = pytest_command("suite_ranks", *options, *quick, "-k", which)
        done = run_command(notebook, method, command, min(45.0, notebook.left_s - 5), note_variables(out))
        found = read_notes(out)
        made = load_report(report)
        records = made.records if made is not None else []
        starts = [record.start_s for record in records if record.start_s is not None]
        methods = {record.start_method for record in records}
        notebook.check(
            f"ranks by {method}: {tests} tests with torch, each in a new rank",
            done.code == 0 and methods == {method} and len(found) == tests,
            f"start methods {sorted(map(str, methods))}, ranks ready in "
            f"{', '.join(f'{each:.2f} s' for each in starts)}; {done.last}",
        )
        exchanged = next((note for note in found if note["test"] == "exchange"), None)
        wanted = "gloo" if notebook.dry else "nccl"
        notebook.check(
            f"ranks by {method}: one rank has a process group ({wanted})",
            exchanged is not None and exchanged["backend"] == wanted and exchanged["sum"] == 1.0,
            json.dumps(exchanged),
        )


def _check_doctor(notebook: Notebook) -> None:
    """Run ``llenergy doctor`` with a trial of each meter and backend."""
    done = run_command(
        notebook, "doctor", [*LLENERGY, "doctor", "--format=json"], min(50.0, notebook.left_s - 5)
    )
    try:
        report = json.loads(done.output[done.output.index("{") :])
    except ValueError:
        notebook.check("llenergy doctor --format=json", False, f"code {done.code}: {done.last}")
        return
    rows = [[line["topic"], line["text"]] for line in report["lines"]]
    notebook.table("llenergy doctor", ["topic", "finding"], rows)
    notebook.data["doctor"] = report
    wrong = [text for topic, text in rows if topic == "wrong"]
    notebook.check("llenergy doctor: nothing is misconfigured", not wrong, "; ".join(wrong))


@dataclass(frozen=True)
class Cleanup:
    """Seconds after a kill until each resource was released; None if it was not released in time."""

    victim: str
    after_s: float
    processes_s: float | None
    memory_s: float | None
    lease_s: float | None
    left: str = ""

    @property
    def clean(self) -> bool:
        """Whether everything was released in time."""
        return None not in (self.processes_s, self.memory_s, self.lease_s)


def _kill_runs(notebook: Notebook, uuid: str | None) -> None:
    random = Random(1)
    baseline = _used_bytes(uuid)
    found: list[Cleanup] = []
    while notebook.left_s > 13.0 and len(found) < (len(VICTIMS) if notebook.dry else 40):
        victim = VICTIMS[len(found) % len(VICTIMS)]
        one = _kill_run(notebook, victim, 1.5 * random.random(), uuid, baseline, len(found))
        if isinstance(one, str):
            notebook.check("a test starts its work before it is killed", False, one)
            return
        found.append(one)
    if not found:
        notebook.check("kill -9", None, "out of time")
        return
    notebook.table(
        "kill -9 of a run whose rank holds 2 GiB of the board",
        ["victim", "killed after s", "processes gone s", "memory back s", "lease free s", "left"],
        [[one.victim, one.after_s, one.processes_s, one.memory_s, one.lease_s, one.left] for one in found],
        "Seconds after the kill.",
    )
    clean = sum(one.clean for one in found)
    lease = [one.lease_s for one in found if one.lease_s is not None]
    notebook.check(
        "after kill -9: no process left, memory released, lease free",
        clean == len(found),
        f"{clean} of {len(found)} clean"
        + (f"; lease free after {median(lease):.2f} s (median)" if lease else ""),
    )


def _kill_run(
    notebook: Notebook, victim: str, after_s: float, uuid: str | None, baseline: int | None, number: int
) -> Cleanup | str:
    """Start a run, kill it while it works, and wait for cleanup.

    Returns the reason as text if it never started to work.
    """
    ready, log = notebook.file(f"ready-{number}"), notebook.file(f"storm-{number}.txt")
    ready.unlink(missing_ok=True)
    mark = f"{os.getpid()}-{number}-{time.monotonic_ns()}"
    environment = make_environment(notebook, {"LLENERGY_VALIDATION_READY": str(ready), MARKER: mark})
    with log.open("w") as to:
        started = subprocess.Popen(
            pytest_command("suite_storm"),
            env=environment,
            stdout=to,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_s = time.monotonic() + min(READY_S, notebook.left_s - 4)
        while not ready.exists():
            if started.poll() is not None or time.monotonic() > until_s:
                lines = log.read_text().strip().splitlines()
                return lines[-1] if lines else "pytest printed nothing"
            time.sleep(0.02)
        rank = int(ready.read_text())
        time.sleep(after_s)
        os.kill(_pid_of(victim, started.pid, rank), signal.SIGKILL)
        return _wait_for_cleanup(victim, after_s, mark, uuid, baseline, started)
    finally:
        with suppress(ProcessLookupError):
            started.kill()
        started.wait()
        ready.unlink(missing_ok=True)


def _pid_of(victim: str, pytest: int, rank: int) -> int:
    if victim == "supervisor":
        return int(psutil.Process(rank).ppid())
    return rank if victim == "rank" else pytest


def _wait_for_cleanup(
    victim: str,
    after_s: float,
    mark: str,
    uuid: str | None,
    baseline: int | None,
    started: subprocess.Popen[bytes],
) -> Cleanup:
    killed_s = time.monotonic()
    gone: dict[str, float] = {}
    while len(gone) < 3 and time.monotonic() - killed_s < GONE_S:
        # A run whose rank or supervisor was killed exits by itself; it stays a zombie until it is waited for.
        started.poll()
        now = {
            "processes": not survivors(mark),
            "memory": baseline is None or (_used_bytes(uuid) or 0) <= baseline + SLACK_BYTES,
            "lease": _is_free(uuid),
        }
        for name, is_gone in now.items():
            if is_gone:
                gone.setdefault(name, time.monotonic() - killed_s)
        time.sleep(0.02)
    left = "; ".join(command.strip()[:80] for command in survivors(mark).values())
    return Cleanup(
        victim=victim,
        after_s=after_s,
        processes_s=gone.get("processes"),
        memory_s=gone.get("memory"),
        lease_s=gone.get("lease"),
        left=left,
    )


def _used_bytes(uuid: str | None) -> int | None:
    """Return the bytes in use on the board; None for the CPU."""
    return None if uuid is None else read_memory_use((uuid,)).get(uuid)


def _is_free(uuid: str | None) -> bool:
    try:
        acquire(LockRequest((DeviceLock(uuid or CPU),)), 0.0, "validation: storms").release()
    except DeviceError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main("workers", body, BUDGET_S))
