# SPDX-License-Identifier: Apache-2.0
"""Boards and driver for a report, asked here or in a process of its own."""

from __future__ import annotations

import sys

import msgspec

from pytest_llenergy.devices.query import query_error, run_module
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board


class Told(msgspec.Struct):
    """The boards that answer, in PCI order, and the driver's version. ``missing`` is why the rest is not."""

    boards: list[Board] = msgspec.field(default_factory=list)
    driver: str | None = None
    missing: list[str] = msgspec.field(default_factory=list)


def ask() -> Told:
    """What the driver tells to this process."""
    from pytest_llenergy.devices.inventory import answering

    found = answering()
    return Told(list(found.boards), found.driver, [*found.lost.values(), *found.refusals])


def ask_apart() -> Told:
    """The same from another process."""
    try:
        return msgspec.json.decode(run_module(__name__), type=Told)
    except msgspec.DecodeError as error:
        return Told(missing=[str(query_error(str(error)))])
    except DeviceError as error:
        return Told(missing=[str(error)])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ask()))
