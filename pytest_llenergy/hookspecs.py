# SPDX-License-Identifier: Apache-2.0
"""Hooks that other plugins and conftest files implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_llenergy.backends.base import BackendSpec
    from pytest_llenergy.energy.meters.base import MeterSpec
    from pytest_llenergy.record.record import Record
    from pytest_llenergy.record.report import Report


def pytest_llenergy_backends(config: pytest.Config) -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Return more backends; one with the name of an existing backend replaces it.

    The ranks import the factory, so it must be importable by name. Packages can use the entry-point group
    ``pytest_llenergy.backends`` instead.

    .. versionadded:: 0.1
    """


def pytest_llenergy_meters(config: pytest.Config) -> Sequence[MeterSpec]:  # type: ignore[empty-body]
    """Return more meters; one with the name of an existing meter replaces it.

    Packages can use the entry-point group ``pytest_llenergy.meters`` instead.

    .. versionadded:: 0.1
    """


@pytest.hookspec(firstresult=True)
def pytest_llenergy_record(item: pytest.Item, record: Record) -> Record | None:
    """Receive a finished record in the process that ran the test; a returned record replaces it.

    .. versionadded:: 0.1
    """


def pytest_llenergy_report(config: pytest.Config, report: Report) -> None:
    """Receive the report just before it is written, in the process that writes it.

    .. versionadded:: 0.1
    """
