# SPDX-License-Identifier: Apache-2.0
"""The plugin ``llenergy``: the hooks of pytest that every run has, each handed on where there is need.

Every run pays for what is imported here and for what each test is asked. So the rooms behind it are imported
when needed, and hooks that only tests of ours need stand in ``hooks``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy import hookspecs, marks
from pytest_llenergy.fixtures import (
    _llenergy_backend,
    _llenergy_lease,
    _llenergy_measured,
    _llenergy_place,
    backend,
    energy,
    energy_meter,
    energy_model,
    gpus,
    prompts,
    workers,
)
from pytest_llenergy.options import add_options, says_something
from pytest_llenergy.process import (
    BACKEND_PARAMETER,
    BEGAN,
    ENVIRONMENT,
    LEASE,
    READY,
    Known,
    hands_out,
    is_measured,
)

if TYPE_CHECKING:
    from pytest_llenergy.errors import LLEnergyError

__all__ = [
    "_llenergy_backend",
    "_llenergy_lease",
    "_llenergy_measured",
    "_llenergy_place",
    "backend",
    "energy",
    "energy_meter",
    "energy_model",
    "gpus",
    "prompts",
    "workers",
]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add_options(parser)
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    for mark in marks.MARKS:
        config.addinivalue_line("markers", str(mark.__doc__))
    config.stash[ENVIRONMENT] = dict(os.environ)
    config.stash[BEGAN] = time.time()
    config.stash[READY] = lambda: _ready(config)
    if config.pluginmanager.has_plugin("pytest_forked") and not config.option.collectonly:
        from pytest_llenergy.integrations.forked import Forked

        config.pluginmanager.register(Forked(is_measured), "llenergy-forked")
    asked = says_something(config)
    if asked:
        from pytest_llenergy.start import check_settings

        check_settings(config)
    if asked or hands_out(config):
        _ready(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if not says_something(config):
        return None
    from pytest_llenergy.integrations.xdist import useful_workers

    # xdist asks before anything is configured.
    return useful_workers(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if BACKEND_PARAMETER in metafunc.fixturenames or marks.on(metafunc.definition):
        from pytest_llenergy.collection import see_to_function

        see_to_function(metafunc)


# First: what is told of the tests that there are is told of those that are left.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    # Of tests that are only collected, those with an engine have something to tell.
    fixture = BACKEND_PARAMETER if session.config.option.collectonly else LEASE
    if _any_is_ours(session.items, fixture):
        from pytest_llenergy.collection import see_to_tests

        _ready(session.config)
        see_to_tests(session)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    try:
        # Hooks may have added marks, or tests, since tests were collected.
        if Known.ours or LEASE in getattr(item, "fixturenames", ()) or marks.on(item):
            from pytest_llenergy.collection import see_to_test

            see_to_test(item)
        result = yield
        # So may fixtures.
        if marks.on(item):
            from pytest_llenergy.collection import see_to_late_marks

            see_to_late_marks(item)
        return result
    except _error() as error:
        from pytest_llenergy.failure import failure

        raise failure(item, "setup", error) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    # A test may run others within it.
    before, Known.in_body = Known.in_body, item
    try:
        result = yield
        if Known.ours and is_measured(item):
            from pytest_llenergy.recorder import judge

            judge(item)
        return result
    except _error() as error:
        from pytest_llenergy.failure import failure

        raise failure(item, "call", error) from None
    finally:
        Known.in_body = before
        if Known.ours and is_measured(item):
            from pytest_llenergy.recorder import tell_junit

            tell_junit(item)


def _error() -> type[LLEnergyError]:
    """The base of our errors, asked for only where something was raised."""
    from pytest_llenergy.errors import LLEnergyError

    return LLEnergyError


def _ready(config: pytest.Config) -> None:
    from pytest_llenergy.ready import ready

    Known.ours = True
    ready(config)


def _any_is_ours(items: Sequence[pytest.Item], fixture: str) -> bool:
    """Whether a test has this fixture or a mark of ours. What many of them are in is looked at once."""
    above = None
    for item in items:
        if fixture in getattr(item, "fixturenames", ()) or (
            item.own_markers and marks.among(item.own_markers)
        ):
            return True
        if item.parent is not above:
            above = item.parent
            if marks.on(above):
                return True
    return False
