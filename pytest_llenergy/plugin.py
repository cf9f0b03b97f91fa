# SPDX-License-Identifier: Apache-2.0
"""The plugin ``llenergy``: pytest's hooks, each handed on in a line or two.

Every run of pytest pays for what is imported here, so the rooms behind it are imported when needed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Sequence

import pytest

from pytest_llenergy import hookspecs, marks
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.fixtures import (
    BACKEND_PARAMETER,
    LEASE,
    _llenergy_backend,
    _llenergy_lease,
    _llenergy_measured,
    _llenergy_place,
    backend,
    energy,
    energy_meter,
    energy_model,
    gpus,
    is_measured,
    prompts,
    was_measured,
    workers,
)
from pytest_llenergy.options.places import check_savable, check_writable, saved_as
from pytest_llenergy.options.settings import ENVIRONMENT, SETTINGS, read_settings
from pytest_llenergy.options.table import add_options
from pytest_llenergy.role import is_worker

#: Set while the body of a test runs. What is reported meanwhile is a subtest, not the test.
IN_BODY = pytest.StashKey[bool]()

#: Plugins that have a fixture ``benchmark``, and the object that measures its tests.
OTHERS, BENCHMARKS = ("benchmark", "codspeed"), "llenergy-benchmarks"

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
    for line in marks.marker_lines():
        config.addinivalue_line("markers", line)
    settings = read_settings(config)
    config.stash[SETTINGS] = settings
    config.stash[ENVIRONMENT] = dict(os.environ)
    if config.pluginmanager.has_plugin("pytest_forked") and not config.option.collectonly:
        from pytest_llenergy.integrations.forked import Forked

        config.pluginmanager.register(Forked(is_measured), "llenergy-forked")
    if is_worker(config):
        if settings.keeps_something:
            _see_to_benchmarks(config)
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
        from pytest_llenergy.gating import check

        check(config)
    if settings.names_something:
        from pytest_llenergy.state import check_names

        check_names(config)
    if not config.option.collectonly:
        from pytest_llenergy.controller import Controller

        config.pluginmanager.register(Controller(config, settings), "llenergy-controller")
        if settings.keeps_something:
            _see_to_benchmarks(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if "pytest_llenergy.state" in sys.modules:
        from pytest_llenergy.state import close

        close(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    from pytest_llenergy.integrations.xdist import useful_workers

    # xdist asks before anything is configured.
    return useful_workers(config, read_settings(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _has_marks(metafunc.definition):
        from pytest_llenergy.collection import check_marks

        check_marks(metafunc)
        if marks.has(metafunc.definition, marks.energy_gate):
            _see_to_benchmarks(metafunc.config)
    if BACKEND_PARAMETER in metafunc.fixturenames:
        from pytest_llenergy.engines import parametrize_backend

        parametrize_backend(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _anyone_has(items, marks.parallel.__name__):
        from pytest_llenergy.collection import check_degrees

        check_degrees(config, items)


# First: from what xdist's own tells on, the controller waits for these tests, also if others here die.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if is_worker(session.config):
        measured = [item.nodeid for item in session.items if is_measured(item)]
        if measured:
            from pytest_llenergy.errand import errand_of

            errand_of(session.config).tell_tests(measured)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    if not any(BACKEND_PARAMETER in getattr(item, "fixturenames", ()) for item in items):
        return None
    from pytest_llenergy.engines import told_of_engines

    return told_of_engines(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    if is_measured(item):
        from pytest_llenergy.recorder import begin

        # Plugins that run a test again do so within one protocol.
        begin(item)
    try:
        if _has_marks(item) or LEASE in getattr(item, "fixturenames", ()):
            from pytest_llenergy.collection import obey_marks

            obey_marks(item)
        result = yield
        # Fixtures may have added some.
        if _has_marks(item):
            from pytest_llenergy.collection import see_to_lease
            from pytest_llenergy.engines import see_to_engine

            see_to_lease(item)
            see_to_engine(item)
        return result
    except LLEnergyError as error:
        raise _failure(item, "setup", error) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[IN_BODY] = True
    try:
        result = yield
        if was_measured(item):
            from pytest_llenergy.recorder import judge

            judge(item)
        return result
    except LLEnergyError as error:
        raise _failure(item, "call", error) from None
    finally:
        item.stash[IN_BODY] = False
        if was_measured(item):
            from pytest_llenergy.recorder import tell_junit

            tell_junit(item)


def pytest_enter_pdb(config: pytest.Config) -> None:
    if "pytest_llenergy.state" in sys.modules:
        from pytest_llenergy.state import leave_terminal

        leave_terminal(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Others may have ended a test before it was set up here.
    if was_measured(item) or (call.when == "setup" and is_measured(item)):
        from pytest_llenergy.recorder import attach, note_part

        (note_part if item.stash.get(IN_BODY, False) else attach)(item, report)
    return report


def _see_to_benchmarks(config: pytest.Config) -> None:
    """Measure the tests of other benchmark plugins, where there is one."""
    manager = config.pluginmanager
    known = any(manager.has_plugin(name) for name in OTHERS)
    if known and not manager.has_plugin(BENCHMARKS):
        from pytest_llenergy.integrations.benchmark import Benchmarks

        manager.register(Benchmarks(config), BENCHMARKS)


def _anyone_has(items: Sequence[pytest.Item], name: str) -> bool:
    """Whether a test has a mark. What many of them are in is looked at once."""
    seen: set[int] = set()
    for item in items:
        node: pytest.Item | pytest.Collector | None = item
        while node is not None and id(node) not in seen:
            for mark in node.own_markers:
                if mark.name == name:
                    return True
            seen.add(id(node))
            node = node.parent
    return False


def _has_marks(item: pytest.Item) -> bool:
    # What ``iter_markers`` does, in a tenth of its calls: this is asked twice for every test of every run.
    node: pytest.Item | pytest.Collector | None = item
    while node is not None:
        for mark in node.own_markers:
            if mark.name in marks.NAMES:
                return True
        node = node.parent
    return False


def _failure(item: pytest.Item, when: str, error: LLEnergyError) -> BaseException:
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
