# SPDX-License-Identifier: Apache-2.0
"""A process that ends with its parent. Standard library only: the supervisor must start fast."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: prctl(2): include/uapi/linux/prctl.h.
PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, in whatever way.

    Raises:
        SystemExit: If the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
