# SPDX-License-Identifier: Apache-2.0
"""Part 4, sharing: ordinary tests under xdist, foreign processes, and concurrent runs on one GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .part import Notebook, main, need_board, need_cuda
from .session import make_environment, note_variables, pytest_command, read_notes, run_command
from .visibility import run_visible

BUDGET_S = 100.0

#: Time limit of the ordinary tests (seconds): each is isolated and imports torch.
PLAIN_LIMIT_S = 60.0

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
    """Run ordinary tests, then beside a foreign process, then two runs at once."""
    uuid = ""
    if not notebook.dry:
        need_cuda()
        uuid = need_board()
    _check_plain(notebook)
    _check_foreign(notebook, uuid)
    _check_queue(notebook)


def _check_plain(notebook: Notebook) -> None:
    """Run ordinary tests that use torch themselves, under xdist."""
    what = "ordinary gpus(1) tests with torch, under xdist, see their GPU"
    if notebook.dry:
        notebook.check(what, None, "needs CUDA")
        return
    more = note_variables(notebook.file("plain.jsonl"))
    done = run_command(notebook, "plain", pytest_command("suite_plain", "-n", "2"), PLAIN_LIMIT_S, more)
    notebook.check(what, done.code == 0 and "3 passed" in done.output, done.last)


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
        done, _, _ = run_visible(notebook, "foreign", uuid, "--energy-lease-timeout=2")
        message = next((line for line in done.output.splitlines() if "busy with" in line), done.last)
        notebook.check(what, done.code == 1 and "busy with" in done.output, message.strip())
        if notebook.left_s < 25.0:
            notebook.check("--energy-busy=skip skips the test", None, "out of time")
            return
        done, _, _ = run_visible(
            notebook, "foreign-skip", uuid, "--energy-lease-timeout=2", "--energy-busy=skip"
        )
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
    sys.exit(main("sharing", body, BUDGET_S))
