# SPDX-License-Identifier: Apache-2.0
"""Which part a process has under pytest-xdist: who has the say, and who runs tests.

Records travel on test reports, so a worker that dies takes with it only the test that it was running.
"""

from __future__ import annotations

import pytest


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for a controller."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """Whether other processes run the tests of this one."""
    return config.pluginmanager.has_plugin("dsession")


def hands_out(config: pytest.Config) -> bool:
    """Whether this process will have others run its tests, told before these are there."""
    return bool(config.getoption("dist", "no") != "no")
