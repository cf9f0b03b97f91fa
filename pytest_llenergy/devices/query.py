# SPDX-License-Identifier: Apache-2.0
"""Ask for devices in a separate process, so that this one opens no driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.errors import DeviceError

#: A driver that does not answer must not keep a run from beginning, or from going on (seconds).
LONGEST_S = 30.0

#: ``python -m`` would look for modules in the current directory first, where a project may have a random.py;
#: ``-P``, which prevents that, came with Python 3.11. The package comes last: beside it in site-packages may
#: lie old backports of standard modules.
PROGRAM = """
import sys
sys.path[:] = [place for place in sys.path if place]
sys.path.append(sys.argv.pop(1))
from runpy import run_module
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run_module(module: str, *arguments: str) -> str:
    """What the program writes to standard output. Raises ``DeviceError`` with its last words if it fails."""
    root = Path(pytest_llenergy.__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, str(root), module, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"NVML: the driver has not answered for {LONGEST_S:g} s; see nvidia-smi") from None
    except OSError as error:
        raise query_error(str(error)) from None
    if done.returncode:
        raise query_error((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def query_error(reason: str) -> DeviceError:
    """The error for a program that did not do what it is for."""
    return DeviceError(f"the process that asks the NVIDIA driver failed: {reason}; see llenergy doctor")
