# SPDX-License-Identifier: Apache-2.0
"""Stash keys shared by the plugin's modules, and the process-wide state of a run.

Every run of pytest imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

#: The environment as the run found it: what a test sets there must not give later ones other devices.
ENVIRONMENT = pytest.StashKey[Mapping[str, str]]()

#: When the run began (seconds since the epoch).
BEGAN = pytest.StashKey[float]()

#: Readies the run for tests of ours, where none was known of when tests were collected.
READY = pytest.StashKey[Callable[[], None]]()

#: Set once a test has asked for energy, also where it did so by ``request.getfixturevalue``.
MEASURED = pytest.StashKey[bool]()

#: Fixtures by which a test asks for devices, for what it needs to measure, and for a record. Every fixture
#: that measures asks for them, so that users' own names and overrides cannot deceive.
LEASE, PLACE, MEASURING = "_llenergy_lease", "_llenergy_place", "_llenergy_measured"

#: The fixture whose parameter names the backend of a test.
BACKEND_PARAMETER = "_llenergy_backend"


class Known:
    """What is known of the tests of this process, so that most runs ask each of them next to nothing."""

    #: Whether there may be any that measures, leases or has a mark of ours. Once it was so, each is asked.
    ours = False

    #: The one whose body runs, if any.
    in_body: pytest.Item | None = None


def is_measured(item: pytest.Item) -> bool:
    """Whether a test asks for energy. It then has a record, whatever becomes of it."""
    # ``get`` would raise and catch an error for every test that asks for nothing.
    return MEASURING in getattr(item, "fixturenames", ()) or (MEASURED in item.stash and item.stash[MEASURED])


def hands_out(config: pytest.Config) -> bool:
    """Whether this process will have others run its tests, told before these are there."""
    # As pytest-xdist decides it: a way to hand them out alone is none.
    others = config.getoption("dist", "no") != "no" and config.getoption("tx", None)
    return bool(others) and not config.option.collectonly
