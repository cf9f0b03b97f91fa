# SPDX-License-Identifier: Apache-2.0
"""How many GPUs may be leased, asked in a process of its own: the one that asks opens no driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

#: A driver that does not answer must not keep a run from beginning (seconds).
LONGEST_S = 30.0


def leasable(selection: str | None = None) -> int:
    """GPUs and MIG instances of the commonest model that may be leased; 0 where that fails.

    That is by the environment, or by ``--energy-gpus``. A test for one GPU runs on boards of one model.
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

    found = present(without_lost=True)
    may = allowed(found, arguments[0] if arguments else None, os.environ)
    models = Counter(found.device(uuid).name for uuid in may.uuids)
    sys.stdout.write(f"{max(models.values(), default=0)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
