# SPDX-License-Identifier: Apache-2.0
"""What the process of an isolated test runs: a config like that of a worker of pytest-xdist, and one test."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import Any

import msgspec
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


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of a test and of what contains it within its file."""
    outside = (pytest.Session, pytest.Directory, pytest.File)
    return tuple(node.name for node in item.listchain() if not isinstance(node, outside))


def run_test(
    *,
    args: list[str],
    plugins: list[str],
    directory: str,
    environment: dict[str, str],
    worker_input: dict[str, Any],
    base_temp: str | None,
    path: str,
    names: tuple[str, ...],
    node_id: str,
    lease: Lease,
) -> None:
    """Run one test in this process, and send its reports. Called in a rank that has run nothing else.

    Args:
        args: Arguments of the command line.
        plugins: Names of plugins that ``pytest.main`` was given.
        directory: Where pytest was started.
        environment: All variables; the visible devices come from the lease.
        worker_input: As pytest-xdist gives it to its workers.
        base_temp: Directory for ``tmp_path``.
        path: File of the test.
        names: ``names_of`` the test.
        node_id: Its id in reports.
        lease: Its devices.

    Raises:
        PlanError: The test is not found again.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    # Those of ranks, such as WORLD_SIZE, would make libraries join a process group.
    os.environ.clear()
    os.environ.update(environment | visible_variables(lease.uuids) | {SUPERVISOR_VARIABLE: supervisor})
    os.chdir(directory)
    sender = _Sender()
    config = sender.config = _prepareconfig(args, [*plugins, sender])
    for name in OFF.keys() & vars(config.option):
        setattr(config.option, name, OFF[name])
    config.option.basetemp, config.args = base_temp, [path]
    config.workerinput, config.workeroutput = worker_input, {}  # type: ignore[attr-defined]
    config.stash[GIVEN_LEASE] = lease
    session = pytest.Session.from_config(config)
    try:
        config._do_configure()
        config.hook.pytest_sessionstart(session=session)
        try:
            _run_one(session, sender, names, node_id)
        finally:
            status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
            config.hook.pytest_sessionfinish(session=session, exitstatus=status)
    finally:
        config._ensure_unconfigure()


def _run_one(session: pytest.Session, sender: _Sender, names: tuple[str, ...], node_id: str) -> None:
    session.config.hook.pytest_collection(session=session)
    collected = session.items
    session.items = [each for each in collected if names_of(each) == names]
    if len(session.items) != 1:
        what = sender.collect_error or f"{len(collected)} tests there, {len(session.items)} of this name"
        raise PlanError(
            f"{node_id} was collected again in a process of its own, which found: {what}; "
            "@pytest.mark.gpus(..., isolate=False) runs it in pytest's process"
        )
    item = session.items[0]
    # As pytest-xdist names it, or as seen from the arguments of the run.
    item._nodeid = node_id  # type: ignore[attr-defined]
    sender.send_captured()
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


class _Sender:
    """A plugin that announces each phase of the test, and sends reports and warnings."""

    config: pytest.Config

    def __init__(self) -> None:
        self.collect_error = ""

    def send(self, kind: str, content: object) -> None:
        """Send a message. What only this process could unpickle becomes text."""
        RankServer.current.send_message((kind, msgspec.to_builtins(content, enc_hook=str)))

    def send_captured(self) -> None:
        """Say in which files the output of the test is captured."""
        manager: Any = self.config.pluginmanager.getplugin("capturemanager")
        files = {}
        for name, stream in (("stdout", "out"), ("stderr", "err")):
            # With --capture=sys it is in memory.
            with suppress(AttributeError, OSError):
                number = getattr(manager._global_capturing, stream).tmpfile.fileno()
                files[name] = f"/proc/{os.getpid()}/fd/{number}"
        self.send("captured", files)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.send("phase", "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self.send("phase", "call")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self.send("phase", "teardown")

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
            self.send("warning", (named, location))


def read_warning(named: tuple[str, str, str, str, int]) -> warnings.WarningMessage:
    """Return a warning of the process; one of a class that is unknown here gets a class of that name."""
    module, name, text, file, line = named
    kind = getattr(sys.modules.get(module), name, None) or type(name, (Warning,), {})
    return warnings.WarningMessage(text, kind, file, line)
