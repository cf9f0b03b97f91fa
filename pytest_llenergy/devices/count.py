# SPDX-License-Identifier: Apache-2.0
"""How many GPUs may be leased, asked in a process of its own: the one that asks opens no driver."""

from __future__ import annotations

import os
import subprocess
import sys

#: A driver that does not answer must not keep a run from beginning (seconds).
LONGEST_S = 30.0


def leasable(selection: str | None = None) -> int:
    """GPUs and MIG instances that the environment, or ``--energy-gpus``, allows; 0 where that fails.

    What is wrong is told by the first test that asks for one.
    """
    command = [sys.executable, "-m", __name__, *([selection] if selection is not None else [])]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=True)
        return int(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def main(arguments: list[str]) -> None:
    """Write the number to standard output."""
    from pytest_llenergy.devices.allot import allowed
    from pytest_llenergy.devices.inventory import present

    may = allowed(present(), arguments[0] if arguments else None, os.environ)
    sys.stdout.write(f"{len(may.uuids)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
