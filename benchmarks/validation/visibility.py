# SPDX-License-Identifier: Apache-2.0
"""Part 4, visibility: CUDA_VISIBLE_DEVICES outside and in ranks, foreign processes, and queueing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import stand_in
from .part import Notebook, main, need_board, need_cuda, scratch
from .session import (
    FinishedCommand,
    make_environment,
    note_variables,
    pytest_command,
    read_notes,
    run_command,
)
from .suite_plugin import NOT_INITIALIZED, STATE_VARIABLE

BUDGET_S = 58.0

#: A UUID that no board has.
UNKNOWN_UUID = "GPU-00000000-0000-4000-8000-000000000000"

#: Outer values that hide every GPU.
HIDING = ("", "-1", UNKNOWN_UUID)

#: Time limit of one pytest run (seconds).
LIMIT_S = 30.0

#: A foreign process on the board: holds memory and computes until its standard input is closed.
FOREIGN_PROGRAM = """
import sys, threading, torch
held = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
matrix = torch.randn(4096, 4096, device="cuda")
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
(matrix @ matrix).sum().item()
print("there", flush=True)
while not over.is_set():
    (matrix @ matrix).sum().item()
"""


def body(notebook: Notebook) -> None:
    """Check outer settings, then a foreign process, then two concurrent runs."""
    with ExitStack() as stack:
        if notebook.dry:
            directory = stack.enter_context(scratch("visibility"))
            uuid = stack.enter_context(stand_in.board(directory))
        else:
            need_cuda()
            uuid = need_board()
        rows: list[list[str | float | int | None]] = []
        # None of these uses the board, so they run concurrently.
        with ThreadPoolExecutor() as threads:
            hidden = [(value, threads.submit(_pytest, notebook, f"hidden{value}", value)) for value in HIDING]
        rows += [_check_hidden(notebook, value, *run.result()) for value, run in hidden]
        for shown in (None, "0", uuid):
            rows.append(_check_visible(notebook, shown, uuid))
        notebook.table(
            "A test with gpus(1) under each outer CUDA_VISIBLE_DEVICES",
            ["outer value", "outcome", "seen by the rank", "cuInit in pytest", "s", "last line of pytest"],
            rows,
        )
        _check_foreign(notebook, uuid)
    _check_queue(notebook)


def _pytest(
    notebook: Notebook, name: str, value: str | None, *options: str
) -> tuple[FinishedCommand, Path, Path]:
    out, state = notebook.file(f"{name}.jsonl"), notebook.file(f"{name}-cuda.json")
    state.unlink(missing_ok=True)
    more = {**note_variables(out), STATE_VARIABLE: str(state), "CUDA_VISIBLE_DEVICES": value}
    limit_s = min(LIMIT_S, notebook.left_s - 2)
    return run_command(notebook, name, pytest_command("suite_visible", *options), limit_s, more), out, state


def _initialised(state: Path) -> str:
    """Return whether pytest's own process has initialised CUDA."""
    if not state.exists():
        return "unknown"
    cuda = json.loads(state.read_text())
    touched = cuda["torch"] or cuda["uvm"] or cuda["driver"] not in (None, NOT_INITIALIZED)
    return "YES" if touched else "no"


def _check_hidden(
    notebook: Notebook, value: str, done: FinishedCommand, _out: Path, state: Path
) -> list[str | float | int | None]:
    """Check that a test is skipped with a reason if the outer value hides every GPU."""
    reason = next((line for line in done.output.splitlines() if line.startswith("SKIPPED")), done.last)
    skipped = done.code == 0 and "1 skipped" in done.output and repr(value) in reason
    touched = _initialised(state)
    notebook.check(f"CUDA_VISIBLE_DEVICES={value!r}: skipped with a reason", skipped, reason)
    notebook.check(f"CUDA_VISIBLE_DEVICES={value!r}: no CUDA in pytest", touched == "no", touched)
    return [repr(value), "skipped" if skipped else "NOT SKIPPED", "", touched, done.seconds, reason]


def _check_visible(notebook: Notebook, value: str | None, uuid: str) -> list[str | float | int | None]:
    """Check that with an outer value that allows the board the rank sees this board and no other."""
    setting = "unset" if value is None else repr(value)
    if notebook.dry:
        notebook.check(f"CUDA_VISIBLE_DEVICES {setting}: the rank sees its lease", None, "needs CUDA")
        return [setting, "needs CUDA", "", "", None, ""]
    name = f"seen-{'unset' if value is None else value}"
    done, out, state = _pytest(notebook, name, value)
    found = read_notes(out)
    seen = found[0]["seen"]["uuids"] if found else []
    lease = found[0]["lease"] if found else []
    touched = _initialised(state)
    notebook.check(
        f"CUDA_VISIBLE_DEVICES {setting}: lease, CUDA's properties and NVML name one board",
        # Without a setting, a host with several boards may lease another one.
        done.code == 0 and seen == lease and (value is None or lease == [uuid]),
        f"lease {lease}, CUDA {seen}, NVML {uuid}; {done.last}",
    )
    notebook.check(f"CUDA_VISIBLE_DEVICES {setting}: no CUDA in pytest", touched == "no", touched)
    outcome = "passed" if done.code == 0 else f"FAILED ({done.code})"
    return [setting, outcome, ", ".join(seen), touched, done.seconds, done.last]


@contextmanager
def _foreign_process() -> Iterator[bool]:
    """Run a foreign process on the board; yields whether it started."""
    command = [sys.executable, "-c", FOREIGN_PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            yield other.stdout.readline() == "there\n"
            other.stdin.close()
            other.wait(timeout=10)
        finally:
            other.kill()


def _check_foreign(notebook: Notebook, uuid: str) -> None:
    what = "a foreign process on the board is detected"
    if notebook.dry:
        notebook.check(what, None, "needs CUDA")
        return
    with _foreign_process() as started:
        if not started:
            notebook.check(what, None, "the foreign process did not start")
            return
        done, _, _ = _pytest(notebook, "foreign", uuid, "--energy-lease-timeout=2")
        message = next((line for line in done.output.splitlines() if "busy with" in line), done.last)
        notebook.check(what, done.code == 1 and "busy with" in done.output, message.strip())
        if notebook.left_s < 25.0:
            notebook.check("--energy-busy=skip skips the test", None, "out of time")
            return
        done, _, _ = _pytest(notebook, "foreign-skip", uuid, "--energy-lease-timeout=2", "--energy-busy=skip")
        notebook.check("--energy-busy=skip skips the test", "1 skipped" in done.output, done.last)


def _check_queue(notebook: Notebook) -> None:
    """Start two pytest runs at once and check that both pass, one after the other."""
    out = notebook.file("queue.jsonl")
    environment = make_environment(notebook, note_variables(out))
    begin_s = time.monotonic()
    logs = [notebook.file(f"queue-{number}.txt") for number in (1, 2)]
    runs = []
    for log in logs:
        with log.open("w") as to:
            command = pytest_command("suite_queue")
            runs.append(subprocess.Popen(command, env=environment, stdout=to, stderr=subprocess.STDOUT))
    codes: list[int | None] = []
    try:
        for each in runs:
            try:
                codes.append(each.wait(timeout=max(1.0, notebook.left_s - 2)))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for each in runs:
            each.kill()
            each.wait()
    turns = sorted((note["start_ns"], note["end_ns"]) for note in read_notes(out))
    apart = len(turns) == 2 and turns[0][1] <= turns[1][0]
    gap = f", {(turns[1][0] - turns[0][1]) / 1e9:.2f} s between them" if len(turns) == 2 else ""
    notebook.check(
        "two concurrent pytest runs take turns on the device",
        codes == [0, 0] and apart,
        f"exit codes {codes}, {len(turns)} turns{gap}, {time.monotonic() - begin_s:.1f} s in all",
    )


if __name__ == "__main__":
    sys.exit(main("visibility", body, BUDGET_S))
