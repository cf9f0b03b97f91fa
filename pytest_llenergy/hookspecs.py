# SPDX-License-Identifier: Apache-2.0
"""Hooks that other plugins and conftest files implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_llenergy.backends.base import BackendSpec
    from pytest_llenergy.meters.base import MeterSpec
    from pytest_llenergy.model.record import Record
    from pytest_llenergy.model.report import Report


def pytest_llenergy_backends(config: pytest.Config) -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Give more backends. A name that exists already is replaced.

    The factory is imported in the worker processes, so it must be importable by name. Packages can use
    the entry-point group ``pytest_llenergy.backends`` instead.

    .. versionadded:: 0.1
    """


def pytest_llenergy_meters(config: pytest.Config) -> Sequence[MeterSpec]:  # type: ignore[empty-body]
    """Give more meters. A name that exists already is replaced.

    Packages can use the entry-point group ``pytest_llenergy.meters`` instead.

    .. versionadded:: 0.1
    """


@pytest.hookspec(firstresult=True)
def pytest_llenergy_record(item: pytest.Item, record: Record) -> Record | None:
    """See a finished record in the process that ran the test, and replace it by returning another.

    .. versionadded:: 0.1
    """


def pytest_llenergy_report(config: pytest.Config, report: Report) -> None:
    """See the whole report just before it is written, in the controller.

    .. versionadded:: 0.1
    """
