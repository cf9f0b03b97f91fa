# SPDX-License-Identifier: Apache-2.0
"""How many GPUs may be leased, asked in a process of its own: the one that asks opens no driver."""

from __future__ import annotations

import os
import sys
from collections import Counter

from pytest_llenergy.devices.query import query_error, run_module
from pytest_llenergy.errors import DeviceError


def leasable(selection: str | None = None) -> int:
    """GPUs and MIG instances of the commonest model that may be leased.

    That is by the environment, or by ``--energy-gpus``. A test for one GPU runs on boards of one model.
    Raises ``DeviceError`` where that cannot be told.
    """
    told = run_module(__name__, *([selection] if selection is not None else []))
    try:
        return int(told)
    except ValueError:
        raise query_error(f"it says {told!r}") from None


def main(arguments: list[str]) -> None:
    """Write the number to standard output; end with what is wrong."""
    from pytest_llenergy.devices.allocation import allowed
    from pytest_llenergy.devices.inventory import present

    try:
        found = present(without_lost=True)
        may = allowed(found, arguments[0] if arguments else None, os.environ)
    except DeviceError as error:
        raise SystemExit(str(error)) from None
    models = Counter(found.device(uuid).name for uuid in may.uuids)
    sys.stdout.write(f"{max(models.values(), default=0)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
