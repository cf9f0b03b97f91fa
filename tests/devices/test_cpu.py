# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: the facts are those of this process."""

from __future__ import annotations

import os

import pytest

from pytest_llenergy.devices.cpu import describe_host, usable_cpus


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_only_the_cpus_that_this_process_may_use_count() -> None:
    allowed = os.sched_getaffinity(0)
    only = min(allowed)
    os.sched_setaffinity(0, {only})
    try:
        assert usable_cpus() == (only,)
        assert describe_host().logical_cpus == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cpus() == tuple(sorted(allowed))
