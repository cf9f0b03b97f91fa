# SPDX-License-Identifier: Apache-2.0
"""The plugin object: registers options, wires hooks and starts a run."""

from __future__ import annotations

import os
import time
import traceback
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
from pytest_llenergy.stash import (
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

# The plugin ``llenergy``: the hooks of pytest that every run has, each handed on where there is need.
#
# Every run pays for what is imported here and for what each test is asked. So the rooms behind it are
# imported when needed, and hooks that only tests of ours need stand in ``hooks``.

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
        check_settings(config)
    if asked or hands_out(config):
        _ready(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if not says_something(config):
        return None
    from pytest_llenergy.xdist import useful_workers

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


# What a run needs that has, or may have, tests of ours. Others are spared what is imported here.


def ready(config: pytest.Config) -> None:
    """Put in place what is not there yet."""
    from pytest_llenergy.xdist import is_worker

    manager = config.pluginmanager
    if not hands_out(config) and not manager.has_plugin("llenergy-hooks"):
        manager.register(Hooks(), "llenergy-hooks")
    if is_worker(config) or config.option.collectonly or manager.has_plugin("llenergy-controller"):
        return
    from pytest_llenergy.controller import Controller

    manager.register(Controller(config, config.stash[BEGAN]), "llenergy-controller")


# Before anything is collected, in a run whose options say something: whether all of it can be done.


def check_settings(config: pytest.Config) -> None:
    """Raises ``pytest.UsageError``; a worker only for values, as all else is the controller's."""
    from pytest_llenergy.collection import see_to_benchmarks
    from pytest_llenergy.errors import LLEnergyError
    from pytest_llenergy.options import check_savable, check_writable, saved_as, settings_of
    from pytest_llenergy.xdist import is_worker

    settings = settings_of(config)
    if settings.keeps_something:
        see_to_benchmarks(config)
    if is_worker(config):
        return
    if settings.report is not None:
        check_writable(settings.report)
    if settings.html is not None:
        from pytest_llenergy.report.html.svg import require_html_extra

        check_writable(settings.html, "--energy-html")
        try:
            require_html_extra()
        except LLEnergyError as error:
            raise pytest.UsageError(f"--energy-html: {error}") from None
    if settings.save is not None:
        check_savable(saved_as(config, settings.save))
    if settings.compare is not None or settings.fail_on:
        from pytest_llenergy.gating import check

        check(config)
    if settings.names_something:
        from pytest_llenergy.session import check_names

        check_names(config)


# What a test ends with where an error of ours ends it.


def failure(item: pytest.Item, when: str, error: LLEnergyError) -> BaseException:
    """Errors of ours speak for themselves: no traceback, and what ranks have printed as sections."""
    for title, text in getattr(error, "sections", ()):
        item.add_report_section(when, title, text)
    told = [f"{type(error).__name__}: {error}"]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(item.path)
    ]
    if frames:
        told.append(f"{item.path.name}:{frames[-1].lineno}: in {frames[-1].name}")
    # With its traceback, for --pdb.
    return pytest.fail.Exception("\n".join(told), pytrace=False).with_traceback(error.__traceback__)


# Hooks that only a run with tests of ours has: the record of a test goes on the report that decides it.
#
# Reports are what pytest-xdist carries, so a worker that dies takes with it only the test that it was
# running.


class Hooks:
    """A plugin object of such a run."""

    def pytest_report_collectionfinish(
        self, config: pytest.Config, items: Sequence[pytest.Item]
    ) -> str | None:
        """Which engines there are, where a test uses any."""
        from pytest_llenergy.collection import told_of_engines

        used = any(BACKEND_PARAMETER in getattr(item, "fixturenames", ()) for item in items)
        return told_of_engines(config) if used else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Around those that are there by then, so that what they make of a test is what its record says."""
        from pytest_llenergy.errors import LLEnergyError
        from pytest_llenergy.recorder import attach, note_part

        # Of set-up and body they are failures already; this is of teardown, and of parts of a test.
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, LLEnergyError):
            call.excinfo = pytest.ExceptionInfo.from_exception(failure(item, call.when, error))
        report = yield
        if is_measured(item):
            # What is reported while the body runs is a subtest, not the test.
            (note_part if Known.in_body is item else attach)(item, report)
        return report

    def pytest_enter_pdb(self, config: pytest.Config) -> None:
        """A debugger has the terminal from now on."""
        from pytest_llenergy.session import leave_terminal

        leave_terminal(config)
