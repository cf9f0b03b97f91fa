# SPDX-License-Identifier: Apache-2.0
"""The plugin ``llenergy``: options, fixtures and hooks.

Every run of pytest imports this module, so modules that only energy tests need are imported on first use.
PYTEST_DONT_REWRITE: see ``pytest_llenergy``.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator

import pytest

from pytest_llenergy import hookspecs
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.plugin import marks
from pytest_llenergy.plugin.fixtures import (
    _llenergy_backend,
    _llenergy_context,
    _llenergy_lease,
    _llenergy_measured,
    backend,
    energy,
    energy_meter,
    energy_model,
    gpus,
    prompts,
    workers,
)
from pytest_llenergy.plugin.settings import add_options, settings_of
from pytest_llenergy.plugin.stash import (
    BACKEND_PARAMETER,
    ENVIRONMENT,
    GIVEN_LEASE,
    ITEM_IN_CALL,
    LEASE,
    NO_TERMINAL,
    is_measured,
    is_worker,
    uses_fixture,
)

__all__ = [
    "_llenergy_backend",
    "_llenergy_context",
    "_llenergy_lease",
    "_llenergy_measured",
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


# Outermost: what it prints is not captured.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    given = early_config.known_args_namespace.energy_worker_gpus
    if given is not None or early_config.getini("energy_worker_gpus"):
        from pytest_llenergy.plugin.worker_gpus import lease_early

        lease_early(early_config)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if settings_of(config).worker_gpus is not None:
        from pytest_llenergy.plugin.worker_gpus import check_or_lease

        check_or_lease(config)
    for mark in marks.MARKS:
        config.addinivalue_line("markers", str(mark.__doc__))
    config.stash[ENVIRONMENT] = dict(os.environ)
    if GIVEN_LEASE in config.stash:
        return
    manager = config.pluginmanager
    check_settings(config)
    if settings_of(config).compare is not None:
        from pytest_llenergy.plugin.baseline import SkippedFiles

        manager.register(SkippedFiles(config))
    if not is_worker(config) and not config.option.collectonly:
        from pytest_llenergy.plugin.controller import Controller

        manager.register(Controller(config), "llenergy-controller")


def check_settings(config: pytest.Config) -> None:
    """Check before collection that the run can do what its options request.

    A worker of pytest-xdist checks values only; the controller has checked the rest.

    Raises:
        pytest.UsageError: An option has an invalid value, or names something that cannot be used.
    """
    settings = settings_of(config)
    if settings.keeps_something:
        from pytest_llenergy.plugin.collection import register_benchmarks

        register_benchmarks(config)
    if is_worker(config):
        return
    if settings.keeps_something and not config.option.collectonly:
        from pytest_llenergy.plugin.checks import check_files, check_launcher

        check_launcher(config.stash[ENVIRONMENT])
        check_files(config)
    if settings.compare is not None or settings.fail_on:
        from pytest_llenergy.plugin.baseline import check_gate_options

        check_gate_options(config)
    if settings.names_something:
        from pytest_llenergy.plugin.checks import check_names
        from pytest_llenergy.plugin.session import state_of

        check_names(config, state_of(config))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    from pytest_llenergy.plugin.xdist import useful_workers

    return useful_workers(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if GIVEN_LEASE in metafunc.config.stash:
        return
    if BACKEND_PARAMETER in metafunc.fixturenames:
        from pytest_llenergy.plugin.collection import parametrize_backend

        parametrize_backend(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings = settings_of(config)
    if settings.skip or settings.only:
        from pytest_llenergy.plugin.collection import skip_by_option

        skip_by_option(settings, items)


# First, so that other plugins report only the tests that remain.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if GIVEN_LEASE in session.config.stash:
        return
    if any(uses_fixture(item, LEASE) or marks.has_energy_marks(item) for item in session.items):
        from pytest_llenergy.plugin.collection import check_collected_tests

        check_collected_tests(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if marks.has_energy_marks(item):
        from pytest_llenergy.plugin.isolated import run_isolated, runs_isolated

        if runs_isolated(item):
            run_isolated(item, nextitem)
            return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    # Otherwise this frame would head the traceback of each fixture of a conftest that fails.
    __tracebackhide__ = True
    try:
        isolated = GIVEN_LEASE in item.config.stash
        # Hooks may have added marks or tests since collection.
        if isolated:
            pass
        elif is_measured(item) or uses_fixture(item, LEASE) or marks.has_energy_marks(item):
            from pytest_llenergy.plugin.collection import prepare_test

            prepare_test(item)
        result = yield
        _check_visibility(item)
        return result
    except LLEnergyError as error:
        raise as_failure(item, "setup", error) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    stash = item.config.stash
    # A test may run other tests of this run within its body.
    outer = stash.get(ITEM_IN_CALL, None)
    stash[ITEM_IN_CALL] = item
    try:
        result = yield
        _check_visibility(item)
        if is_measured(item):
            from pytest_llenergy.plugin.plan import plan_of
            from pytest_llenergy.plugin.recorder import check_extra_info, check_gates

            check_extra_info(item)
            check_gates(item, plan_of(item).gate)
        return result
    except LLEnergyError as error:
        raise as_failure(item, "call", error) from None
    except (KeyboardInterrupt, pytest.exit.Exception):
        # pytest makes no report of this test.
        if is_measured(item):
            from pytest_llenergy.plugin.recorder import deliver_unfinished

            deliver_unfinished(item)
        raise
    finally:
        stash[ITEM_IN_CALL] = outer
        if is_measured(item):
            from pytest_llenergy.plugin.recorder import add_junit_properties

            add_junit_properties(item)


def _check_visibility(item: pytest.Item) -> None:
    if uses_fixture(item, LEASE) or marks.has_energy_marks(item):
        from pytest_llenergy.plugin.visibility import check_visibility

        check_visibility(item)


# Outermost, so that the record has the outcome that other plugins decide on.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # Errors in set-up and call are failures already; this handles teardown and subtests.
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, LLEnergyError):
        call.excinfo = pytest.ExceptionInfo.from_exception(as_failure(item, call.when, error))
    # What a unittest.TestCase has raised, of which pytest makes the report in place of ``call.excinfo``.
    caught: list[pytest.ExceptionInfo[BaseException]] = getattr(item, "_excinfo", None) or []
    for place, each in enumerate(caught):
        if isinstance(each.value, LLEnergyError):
            caught[place] = pytest.ExceptionInfo.from_exception(as_failure(item, call.when, each.value))
    if not is_measured(item):
        return (yield)
    from pytest_llenergy.plugin.recorder import count_failed_subtest, deliver_record

    # A report while the body runs is that of a subtest, not of the test.
    if item.config.stash.get(ITEM_IN_CALL, None) is item:
        subtest = yield
        count_failed_subtest(item, subtest)
        return subtest
    report: pytest.TestReport | None = None
    try:
        report = yield
        deliver_record(item, report)
    except BaseException:
        # Ctrl-C, or an error, in a hook of another plugin. Without its report, pytest's own outcome counts.
        report = report or pytest.TestReport.from_item_and_call(item, call)
        deliver_record(item, report, with_hook=False)
        raise
    return report


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    if isinstance(node, pytest.Item) and uses_fixture(node, LEASE) and GIVEN_LEASE not in node.config.stash:
        from pytest_llenergy.plugin.session import state_of

        state_of(node.config).pool.note_failure()


def pytest_enter_pdb(config: pytest.Config) -> None:
    if GIVEN_LEASE in config.stash:
        raise PlanError(NO_TERMINAL)


def as_failure(item: pytest.Item, when: str, error: LLEnergyError) -> BaseException:
    """Turn an error of this package into a failure of a few lines, with rank output as report sections."""
    for title, text in getattr(error, "sections", ()):
        item.add_report_section(when, title, text)
    lines = [f"{type(error).__name__}: {error}"]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(item.path)
    ]
    if frames:
        lines.append(f"{item.path.name}:{frames[-1].lineno}: in {frames[-1].name}")
    # The traceback is for --pdb.
    return pytest.fail.Exception("\n".join(lines), pytrace=False).with_traceback(error.__traceback__)
