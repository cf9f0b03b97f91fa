# SPDX-License-Identifier: Apache-2.0
"""Query the NVIDIA driver in a subprocess, so that the calling process never opens it.

The module is also the program that runs in the subprocess: ``boards`` prints the boards and the driver
version as JSON, ``count [SELECTION]`` prints how many GPUs may be leased, ``fault SELECTION`` prints what is
wrong with a selection.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.allocation import list_leasable
from pytest_llenergy.devices.inventory import read_answering, read_inventory
from pytest_llenergy.devices.timeouts import QUERY_TIMEOUT_S
from pytest_llenergy.devices.visibility import parse_selection
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board

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


class DriverReport(msgspec.Struct):
    """Boards, driver version and failures as the driver reports them.

    Attributes:
        boards: The boards that answer, in PCI order.
        driver: The driver version.
        missing: One reason for each board, instance or driver that does not answer.
    """

    boards: list[Board] = msgspec.field(default_factory=list)
    driver: str | None = None
    missing: list[str] = msgspec.field(default_factory=list)


def describe_boards() -> DriverReport:
    """Query boards and driver version in this process."""
    inventory = read_answering()
    missing = [*inventory.lost.values(), *inventory.errors]
    return DriverReport(list(inventory.boards), inventory.driver, missing)


def query_boards() -> DriverReport:
    """Query boards and driver version in a subprocess; a failure is a reason in ``missing``."""
    try:
        return msgspec.json.decode(_run_query("boards"), type=DriverReport)
    except msgspec.DecodeError as error:
        return DriverReport(missing=[str(_query_error(str(error)))])
    except DeviceError as error:
        return DriverReport(missing=[str(error)])


def query_gpu_count(selection: str | None = None) -> int:
    """Count, in a subprocess, the GPUs and MIG instances that may be leased.

    Args:
        selection: Value of ``--energy-gpus``; without it the environment decides.

    Raises:
        DeviceError: The driver does not answer, or the environment or selection is invalid.
    """
    output = _run_query("count", *([selection] if selection is not None else []))
    try:
        return int(output)
    except ValueError:
        raise _query_error(f"its output is {output!r}") from None


def query_selection_fault(selection: str) -> str | None:
    """Return, from a subprocess, what is wrong with a value of ``--energy-gpus``; None if nothing is.

    A host whose driver or boards do not answer finds no fault: tests that need a GPU report that.

    Raises:
        DeviceError: The driver does not answer in time.
    """
    return _run_query("fault", selection).strip() or None


def _run_query(*arguments: str) -> str:
    root = Path(pytest_llenergy.__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, str(root), __name__, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=QUERY_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"NVML: the driver has not answered for {QUERY_TIMEOUT_S:g} s; see nvidia-smi"
        ) from None
    except OSError as error:
        raise _query_error(str(error)) from None
    if done.returncode:
        raise _query_error((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def _query_error(reason: str) -> DeviceError:
    return DeviceError(f"the process that queries the NVIDIA driver failed: {reason}; see llenergy doctor")


def _count_gpus(selection: str | None) -> int:
    inventory = read_inventory(without_lost=True)
    return len(list_leasable(inventory, selection, os.environ).uuids)


def _find_selection_fault(selection: str) -> str:
    with suppress(DeviceError):
        inventory = read_inventory(without_lost=True)
        if not inventory.lost:
            try:
                parse_selection(selection, inventory)
            except DeviceError as error:
                return str(error)
    return ""


def _main(query: str, selection: str | None = None) -> None:
    if query == "boards":
        sys.stdout.buffer.write(msgspec.json.encode(describe_boards()))
        return
    if query == "fault" and selection is not None:
        sys.stdout.write(_find_selection_fault(selection))
        return
    try:
        sys.stdout.write(str(_count_gpus(selection)))
    except DeviceError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    _main(*sys.argv[1:])
