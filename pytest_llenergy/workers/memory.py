# SPDX-License-Identifier: Apache-2.0
"""Memory of this process: the GPU's where torch uses one, else resident memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: Writing 5 to clear_refs resets VmHWM (proc_pid_clear_refs(5)).
RESET_PEAK = "5"


def reset_peak_memory() -> None:
    """Start the peak anew, where the system can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        return


def peak_memory_bytes() -> int | None:
    """Highest use since the last reset; ``None`` where the system does not tell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM")


def memory_bytes() -> int | None:
    """What is in use now, caches of freed memory left out; ``None`` where the system does not tell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated())
    return _status_bytes("RssAnon")


def _status_bytes(name: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
