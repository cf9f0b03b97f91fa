# SPDX-License-Identifier: Apache-2.0
"""Empty tests of each kind. What a test costs is the time of its kind minus that of the first."""

from __future__ import annotations

import pytest

from pytest_llenergy.api import BackendHandle, Workers


@pytest.mark.parametrize("i", range(100))
def test_nothing(i: int) -> None:
    assert i >= 0


@pytest.mark.parametrize("i", range(100))
def test_workers(workers: Workers, i: int) -> None:
    workers.run("builtins:int")


@pytest.mark.parametrize("i", range(100))
def test_backend(backend: BackendHandle, i: int) -> None:
    backend.generate(["a"], max_new_tokens=1)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("i", range(20))
def test_gpus(i: int) -> None:
    assert i >= 0
