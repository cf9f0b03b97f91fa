# SPDX-License-Identifier: Apache-2.0
"""pytest-xdist: how many workers help."""

from __future__ import annotations

import os

import pytest

from pytest_llenergy.options.settings import read_settings

#: How xdist is told the number for ``-n auto``.
SAID = "PYTEST_XDIST_AUTO_NUM_WORKERS"

#: Options with which pytest only shows something. xdist asks for a number there too.
LOOKING = (
    "collectonly",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "help",
    "version",
    "setupplan",
    "cacheshow",
)


def useful_workers(config: pytest.Config) -> int | None:
    """How many workers leases can keep busy, for ``-n auto``: one for each GPU, and one where there is none.

    A test on the CPU has the host to itself. Where the GPUs cannot be told there is one, with a warning.
    ``None`` leaves it to others: in a run that keeps no report or runs no test, and where
    ``PYTEST_XDIST_AUTO_NUM_WORKERS`` says it. Raises ``pytest.UsageError`` like ``read_settings``.
    """
    settings = read_settings(config)
    looks = any(config.getoption(name, default=False) for name in LOOKING)
    if not settings.keeps_something or looks or os.environ.get(SAID):
        return None
    from pytest_llenergy.devices.count import leasable
    from pytest_llenergy.errors import DeviceError, LLEnergyWarning

    try:
        return max(1, leasable(settings.gpus))
    except DeviceError as error:
        config.issue_config_time_warning(LLEnergyWarning(f"-n auto starts one worker: {error}"), stacklevel=2)
        return 1
