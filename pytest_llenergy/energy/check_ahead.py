# SPDX-License-Identifier: Apache-2.0
"""Check the energy counters of GPUs in a process of its own, while tests are collected.

The self-check takes one to three seconds once per boot, and no test should have to wait for it. A thread
would share the interpreter's lock, the list of warning filters and the driver's locks with the tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from pytest_llenergy.devices.inventory import may_have_gpus
from pytest_llenergy.energy.timeouts import CHECK_AHEAD_TIMEOUT_S, PROGRAM_END_TIMEOUT_S
from pytest_llenergy.errors import LLEnergyError

#: Program of the process. It finds the same packages as this one.
PROGRAM = """
import sys
sys.path[:] = {path!r}
from pytest_llenergy.energy.check_ahead import check_boards
check_boards({selection!r})
"""


class CounterCheck:
    """A process that checks the boards that tests may use, and caches the results for this one.

    Args:
        selection: Value of ``--energy-gpus``; without it the environment decides.
        environment: The environment.
    """

    def __init__(self, selection: str | None, environment: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not may_have_gpus(environment):
            return
        program = PROGRAM.format(path=sys.path, selection=selection)
        quiet = subprocess.DEVNULL
        with suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=dict(environment),
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
            )

    def wait(self) -> None:
        """Wait until the boards are checked, or give up."""
        if self._process is not None:
            try:
                self._process.wait(CHECK_AHEAD_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.stop()

    def stop(self) -> None:
        """End the check, finished or not."""
        if self._process is not None:
            self._process.kill()
            # A process within a driver that never answers cannot be killed.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PROGRAM_END_TIMEOUT_S)
            self._process = None


def check_boards(selection: str | None) -> None:
    """Check the boards that this process may use. Errors are left to the test that uses the board."""
    from pytest_llenergy.devices.allocation import request_visible, select_devices
    from pytest_llenergy.energy.meters.base import Targets
    from pytest_llenergy.energy.meters.nvml import open_nvml

    with suppress(LLEnergyError):
        devices = select_devices(request_visible(selection)[0], selection)
        for meter in open_nvml(Targets(devices.uuids)):
            meter.close()
