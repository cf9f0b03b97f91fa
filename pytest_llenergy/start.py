# SPDX-License-Identifier: Apache-2.0
"""Before anything is collected, in a run whose options say something: whether all of it can be done."""

from __future__ import annotations

import pytest

from pytest_llenergy.errand import is_worker
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.gating import check
from pytest_llenergy.options.places import check_savable, check_writable, saved_as
from pytest_llenergy.options.settings import settings_of
from pytest_llenergy.state import check_names

#: Plugins that have a fixture ``benchmark``, and the object that measures its tests.
OTHERS, BENCHMARKS = ("benchmark", "codspeed"), "llenergy-benchmarks"


def check_settings(config: pytest.Config) -> None:
    """Raises ``pytest.UsageError``; a worker only for values, as all else is the controller's."""
    settings = settings_of(config)
    if settings.keeps_something:
        see_to_benchmarks(config)
    if is_worker(config):
        return
    if settings.report is not None:
        check_writable(settings.report)
    if settings.html is not None:
        from pytest_llenergy.report.html.svg import check_extra

        check_writable(settings.html, "--energy-html")
        try:
            check_extra()
        except LLEnergyError as error:
            raise pytest.UsageError(f"--energy-html: {error}") from None
    if settings.save is not None:
        check_savable(saved_as(config, settings.save))
    if settings.compare is not None or settings.fail_on:
        check(config)
    if settings.names_something:
        check_names(config)


def see_to_benchmarks(config: pytest.Config) -> None:
    """Measure the tests of other benchmark plugins, where there is one."""
    manager = config.pluginmanager
    known = any(manager.has_plugin(name) for name in OTHERS)
    if known and not manager.has_plugin(BENCHMARKS):
        from pytest_llenergy.integrations.benchmark import Benchmarks

        manager.register(Benchmarks(config), BENCHMARKS)
