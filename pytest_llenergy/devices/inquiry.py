# SPDX-License-Identifier: Apache-2.0
"""Boards and driver, asked in a process of its own: the one that asks opens no driver."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

#: A driver that does not answer must not keep a run from going on (seconds).
LONGEST_S = 30.0


class Answer(msgspec.Struct):
    """What the process tells; ``problem`` is why there is nothing else."""

    boards: list[Board] = []
    driver: str | None = None
    problem: str | None = None


def boards_and_driver() -> tuple[list[Board], str | None]:
    """As ``inventory.boards`` and ``inventory.driver_version``. Raises ``DeviceError`` as they do."""
    try:
        told = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, timeout=LONGEST_S, check=True
        )
        answer = msgspec.json.decode(told.stdout, type=Answer)
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"NVML: the driver has not told its boards for {LONGEST_S:g} s; see nvidia-smi"
        ) from None
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise DeviceError(
            f"NVML: the process that asks the driver failed ({error}); see nvidia-smi"
        ) from None
    if answer.problem is not None:
        raise DeviceError(answer.problem)
    return answer.boards, answer.driver


def main() -> None:
    """Write the answer to standard output as JSON."""
    from pytest_llenergy.devices.inventory import boards, driver_version

    try:
        answer = Answer(boards(), driver_version())
    except DeviceError as error:
        answer = Answer(problem=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
