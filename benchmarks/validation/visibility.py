# SPDX-License-Identifier: Apache-2.0
"""Part 3, visibility: CUDA_VISIBLE_DEVICES outside pytest and in ranks."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from . import stand_in
from .part import Notebook, main, need_board, need_cuda, scratch
from .session import (
    FinishedCommand,
    note_variables,
    pytest_command,
    read_notes,
    run_command,
)
from .suite_plugin import NOT_INITIALIZED, STATE_VARIABLE

BUDGET_S = 65.0

#: A UUID that no board has.
UNKNOWN_UUID = "GPU-00000000-0000-4000-8000-000000000000"

#: Outer values that hide every GPU.
HIDING = ("", "-1", UNKNOWN_UUID)

#: Time limit of one pytest run (seconds).
LIMIT_S = 30.0


def body(notebook: Notebook) -> None:
    """Run a test under each outer setting."""
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
            hidden = [
                (value, threads.submit(run_visible, notebook, f"hidden{value}", value)) for value in HIDING
            ]
        rows += [_check_hidden(notebook, value, *run.result()) for value, run in hidden]
        for shown in (None, "0", uuid):
            rows.append(_check_visible(notebook, shown, uuid))
        notebook.table(
            "A test with gpus(1) under each outer CUDA_VISIBLE_DEVICES",
            ["outer value", "outcome", "seen by the rank", "cuInit in pytest", "s", "last line of pytest"],
            rows,
        )


def run_visible(
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
    done, out, state = run_visible(notebook, name, value)
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


if __name__ == "__main__":
    sys.exit(main("visibility", body, BUDGET_S))
