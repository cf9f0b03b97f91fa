# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: that of its GPUs where torch uses any, else resident memory.

An engine that starts processes of its own has their resident memory counted with it. Pages that they share
count once for each: the system tells how many are shared now, not how many were at the peak.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: Writing 5 to clear_refs resets VmHWM (proc_pid_clear_refs(5)).
RESET_PEAK = "5"


def reset_peak_memory(others: Iterable[int] = ()) -> None:
    """Start the peak anew, where the system can; that of these processes, too."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    for process in ("self", *others):
        with suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text(RESET_PEAK)


def peak_memory_bytes(others: Iterable[int] = ()) -> int | None:
    """Highest use since the last reset, summed over devices, or over processes without any.

    ``None`` where the system does not tell.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return sum(int(torch.cuda.max_memory_allocated(index)) for index in range(torch.cuda.device_count()))
    own = _status_bytes("VmHWM")
    # One that has ended has no memory.
    theirs = (_status_bytes("VmHWM", str(pid)) or 0 for pid in others)
    return None if own is None else own + sum(theirs)


def memory_bytes() -> int | None:
    """What is in use now, caches of freed memory left out; ``None`` where the system does not tell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        return sum(int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count()))
    return _status_bytes("RssAnon")


def _status_bytes(name: str, process: str = "self") -> int | None:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
