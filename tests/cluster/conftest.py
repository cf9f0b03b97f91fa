# SPDX-License-Identifier: Apache-2.0
"""Clusters of two hosts on this machine, one for all tests of a process.

With ``LLENERGY_TEST_CLUSTER=required`` a cluster that cannot be had fails its tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from .slurm import Slurm, missing


def without(reason: str) -> NoReturn:
    """Skip the tests of a cluster that cannot be had, or fail them."""
    if os.environ.get("LLENERGY_TEST_CLUSTER") == "required":
        pytest.fail(f"{reason}, and LLENERGY_TEST_CLUSTER=required")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Slurm]:
    """Run a Slurm of two nodes."""
    reason = missing()
    if reason is not None:
        without(reason)
    slurm = Slurm(tmp_path_factory.mktemp("slurm"), nvml_library)
    yield slurm
    slurm.close()
