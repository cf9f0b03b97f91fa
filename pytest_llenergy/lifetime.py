# SPDX-License-Identifier: Apache-2.0
"""Start a module as a process, and end with its parent. Standard library only: the supervisor starts fast."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

#: ``python -m`` would search the current directory first, where a project may have a ``random.py``; the
#: option ``-P`` that prevents this came with Python 3.11. The directory of the package goes last:
#: site-packages may hold old backports of standard modules.
PROGRAM = """
import sys
sys.path[:] = [place for place in sys.path if place]
sys.path.append(sys.argv.pop(1))
from runpy import run_module
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

#: prctl(2): include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG = 1

#: Variable with which ``llenergy run`` ends what its command leaves behind, which would draw power later on.
ENDS_ALL = "LLENERGY_RUN_ENDS_ALL"


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, such as one of this package, as a program."""
    root = Path(__file__).parents[1]
    return [sys.executable, "-u", "-c", PROGRAM, str(root), name, *arguments]


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, in whatever way.

    Raises:
        SystemExit: If the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
