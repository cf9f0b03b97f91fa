# SPDX-License-Identifier: Apache-2.0
"""What the process of an isolated test runs: a config like that of a worker of pytest-xdist, and one test."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.config import _prepareconfig

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.visibility import visible_variables
from pytest_llenergy.errors import PlanError
from pytest_llenergy.plugin.stash import GIVEN_LEASE
from pytest_llenergy.ranks.server import RankServer
from pytest_llenergy.ranks.transport import SUPERVISOR_VARIABLE

#: Options whose work pytest's own process does: choosing tests, ending the run, writing files.
OFF: dict[str, Any] = {
    **{"dist": "no", "tx": [], "numprocesses": None, "maxprocesses": None, "distload": False},
    **{"usepdb": False, "trace": False, "setupshow": False, "maxfail": 0, "looponfail": False},
    **{"keyword": "", "markexpr": "", "deselect": None, "lf": False, "failedfirst": False, "newfirst": False},
    **{"stepwise": False, "stepwise_skip": False, "cacheclear": False, "xmlpath": None},
    "log_file": os.devnull,
}


@dataclass(frozen=True)
class TestOrder:
    """What to run, with the arguments and surroundings of pytest's own process.

    Attributes:
        args: Arguments of the command line.
        plugins: Names of plugins that ``pytest.main`` was given.
        directory: Where pytest was started.
        environment: All variables; the visible devices come from the lease.
        worker_input: As pytest-xdist gives it to its workers.
        base_temp: Directory for ``tmp_path``.
        path: File of the test.
        names: Names of the test and of the classes and so on in the file that contain it.
        node_id: Its node id in reports.
        lease: Its devices.
    """

    __test__ = False  # pytest would collect a class of this name

    args: tuple[str, ...]
    plugins: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    worker_input: dict[str, Any]
    base_temp: str | None
    path: str
    names: tuple[str, ...]
    node_id: str
    lease: Lease


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of a test and of what contains it within its file."""
    outside = (pytest.Session, pytest.Directory, pytest.File)
    return tuple(node.name for node in item.listchain() if not isinstance(node, outside))


def run_test(order: TestOrder) -> None:
    """Run one test in this process, and send its reports. Called in a rank that has run nothing else.

    Raises:
        PlanError: The test is not found again.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    # Those of ranks, such as WORLD_SIZE, would make libraries join a process group.
    os.environ.clear()
    os.environ.update(
        order.environment | visible_variables(order.lease.uuids) | {SUPERVISOR_VARIABLE: supervisor}
    )
    os.chdir(order.directory)
    sender = _Sender()
    config = _prepareconfig([*order.args], [*order.plugins, sender])
    sender.config = config
    for name, value in OFF.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp, config.args = order.base_temp, [order.path]
    config.workerinput, config.workeroutput = order.worker_input, {}  # type: ignore[attr-defined]
    config.stash[GIVEN_LEASE] = order.lease
    try:
        config._do_configure()
        _run_session(config, sender, order)
    finally:
        config._ensure_unconfigure()
    sender.send("end", sender.ending)


def _run_session(config: pytest.Config, sender: _Sender, order: TestOrder) -> None:
    session = pytest.Session.from_config(config)
    status = pytest.ExitCode.OK
    config.hook.pytest_sessionstart(session=session)
    try:
        config.hook.pytest_collection(session=session)
        found = [item for item in session.items if names_of(item) == order.names]
        if len(found) != 1:
            what = sender.collect_error or f"{len(session.items)} tests there, {len(found)} of this name"
            raise PlanError(
                f"{order.node_id} was collected again in a process of its own, which found: {what}; "
                "@pytest.mark.gpus(..., isolate=False) runs it in pytest's process"
            )
        # As pytest-xdist names it, or as seen from the arguments of the run.
        found[0]._nodeid = order.node_id  # type: ignore[attr-defined]
        session.items = found
        config.hook.pytest_runtest_protocol(item=found[0], nextitem=None)
        sender.ending = {"shouldfail": session.shouldfail, "shouldstop": session.shouldstop}
        status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else status
    finally:
        config.hook.pytest_sessionfinish(session=session, exitstatus=status)


class _Sender:
    """A plugin that announces each phase of the test, and sends reports and warnings."""

    config: pytest.Config

    def __init__(self) -> None:
        self._pid, self.collect_error = os.getpid(), ""
        self.ending: dict[str, object] = {}

    def send(self, kind: str, content: object) -> None:
        """Send a message, unless this is a copy of the process that the test has forked."""
        if os.getpid() != self._pid:
            return
        RankServer.current.send_message((kind, _plain(content)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        with suppress(OSError):
            # What the terminal reporter has printed: an error shows the end of this process's output.
            os.ftruncate(1, 0)
        self._announce("setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._announce("call")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._announce("teardown")

    def _announce(self, phase: str) -> None:
        """Say which phase begins, and in which files the output of the test is captured."""
        manager: Any = self.config.pluginmanager.getplugin("capturemanager")
        files = []
        for name, stream in (("stdout", "out"), ("stderr", "err")):
            # With --capture=sys it is in memory.
            with suppress(AttributeError, OSError):
                files.append((name, getattr(manager._global_capturing, stream).tmpfile.fileno()))
        self.send("phase", (phase, files))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.collect_error:
            self.collect_error = report.longreprtext

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, location: object
    ) -> None:
        # pytest's own process has seen those of the collection.
        if when == "runtest":
            kind, each = warning_message.category, warning_message
            named = (kind.__module__, kind.__name__, str(each.message), each.filename, each.lineno)
            self.send("warning", (named, when, location))


def read_warning(named: tuple[str, str, str, str, int]) -> warnings.WarningMessage:
    """Return a warning of the process; one of a class that is unknown here gets a class of that name."""
    module, name, text, file, line = named
    kind = getattr(sys.modules.get(module), name, None) or type(name, (Warning,), {})
    return warnings.WarningMessage(text, kind, file, line)


def _plain(value: object) -> Any:
    """Convert what only this process can unpickle into text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [*map(_plain, value)]
    return value if value is None or type(value) in (bool, int, float, str, bytes) else str(value)
