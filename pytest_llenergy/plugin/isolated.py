# SPDX-License-Identifier: Apache-2.0
"""A plain test with a mark ``gpus`` runs in a process of its own: pytest's part, which leases and reports.

What runs in that process is in ``isolated_child``.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks, xfailed_key

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import LLEnergyError, WorkerError
from pytest_llenergy.plugin.handles.context import raise_rank_outcomes
from pytest_llenergy.plugin.isolated_child import names_of, read_warning
from pytest_llenergy.plugin.leasing import falls_back, lease_devices
from pytest_llenergy.plugin.plan import plan_of, runs_in_ranks
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.stash import GIVEN_LEASE, ISOLATED, is_worker, uses_energy, uses_fixture
from pytest_llenergy.plugin.xdist import KEY
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.workload import call_workload

#: One process that gets all devices of the test, without a framework of ours.
ONE_PROCESS = Capabilities(opaque=True)

CHILD = "pytest_llenergy.plugin.isolated_child:run_test"


def runs_isolated(item: pytest.Item) -> bool:
    """Return whether a test runs in a process of its own. Tests that will be skipped do not."""
    config = item.config
    try:
        plan = plan_of(item)
        request = plan.gpus
        if request is None or request.isolate is False or GIVEN_LEASE in config.stash:
            return False
        measures = uses_energy(item) or uses_fixture(item, "benchmark")
        if measures or runs_in_ranks(plan, getattr(item, "fixturenames", ())):
            return False
        if request.isolate is None and state_of(config).worker_gpus is not None:
            return False
        if config.getoption("setuponly", False) or evaluate_skip_marks(item) is not None:
            return False
        return bool(request.isolate) or not falls_back(item, request)
    except (LLEnergyError, pytest.fail.Exception):
        # Of an invalid mark, which the set-up of the test will report.
        return False


def run_isolated(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test in a process of its own, and report it as pytest's protocol for one test does."""
    hook, session = item.ihook, item.session
    if (cancel := getattr(item.config.hook, "pytest_timeout_cancel_timer", None)) is not None:
        # Its timer in the other process interrupts the test; here it would interrupt pytest.
        cancel(item=item)
    item.stash[ISOLATED] = True
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with ExitStack() as stack:
        process = _TestProcess(item)
        process.attempt("setup", partial(process.run, stack))

        def tear_down() -> None:
            try:
                stack.close()
            finally:
                ends = session.shouldfail or session.shouldstop
                session._setupstate.teardown_exact(None if ends else nextitem)

        process.attempt("teardown", tear_down)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


class _TestProcess:
    """The process of one test, and the reports that come from it."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._phase: Literal["setup", "call", "teardown"] = "setup"
        self._is_over = False
        #: The last report of the process, logged after the teardown of this one, which may fail.
        self._torn_down: pytest.TestReport | None = None
        self._captured: dict[str, IO[bytes]] = {}
        #: The set-up begins with the lease and the start of the process.
        self._begin_s = time.time()

    def attempt(self, when: Literal["setup", "teardown"], work: Callable[[], None]) -> None:
        """Do the part of this process in a phase.

        A report tells what failed, or ended the other process, in the phase that it was in.
        """
        item, report = self._item, self._torn_down
        call = pytest.CallInfo.from_call(work, when, reraise=(pytest.exit.Exception, KeyboardInterrupt))
        if call.excinfo is None and (when == "setup" or self._is_over):
            return
        if call.excinfo is not None:
            # Of an invalid mark, the report says nothing.
            with suppress(pytest.fail.Exception):
                item.stash[xfailed_key] = evaluate_xfail_marks(item)
            call.when = self._phase
            if report is not None and report.failed:
                self._log(report)
            report = None
        self._log(report or item.ihook.pytest_runtest_makereport(item=item, call=call))
        self._phase = "teardown"

    def run(self, stack: ExitStack) -> None:
        """Lease, start the process, and log its reports as they come.

        Args:
            stack: Gets what ends the process and the lease.

        Raises:
            LLEnergyError: The devices cannot be leased, the process died, or does not find the test.
        """
        item, state = self._item, state_of(self._item.config)
        lease = stack.enter_context(lease_devices(item, plan_of(item).gpus))
        # Ranks that wait for the next test hold memory there.
        state.pool.close_on(lease.uuids)
        group = state.pool.start_alone(plan_processes(ONE_PROCESS, None, lease, usable_cpus()))
        stack.callback(group.kill)
        group.on_message = lambda message: self._take(stack, *message)
        order = _make_order(item, lease)
        try:
            with raise_rank_outcomes():
                call_workload(group, CHILD, (), order, state.settings.timeout).work()
        except WorkerError as error:
            how = re.sub(r"^rank 0 of 1 \([^)]*\):? |; the ranks were ended$", "", error.args[0])
            error.args = (f"during {self._phase}: {how}",)
            sections = [(name, _read(file)) for name, file in self._captured.items()]
            sections += [("output of its process", text) for _, text in error.sections]
            error.sections = tuple((title, text) for title, text in sections if text)
            raise

    def _take(self, stack: ExitStack, kind: str, content: Any) -> None:
        """Handle a message of the process."""
        item, config = self._item, self._item.config
        if kind == "phase":
            self._phase = content
        elif kind == "captured":
            for name, file in zip(content, map(Path, content.values()), strict=True):
                with suppress(OSError):
                    self._captured[name] = stack.enter_context(file.open("rb"))
        elif kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=content)
            self._show_output(report)
            if report.when == "teardown":
                self._torn_down = report
            else:
                self._log(report)
        elif kind == "warning":
            named, location = content
            warning = {"warning_message": read_warning(named), "nodeid": item.nodeid}
            kwargs = {**warning, "when": "runtest", "location": location}
            item.ihook.pytest_warning_recorded.call_historic(kwargs=kwargs)

    def _log(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            report.duration, report.start = report.stop - self._begin_s, self._begin_s
        self._is_over = report.when == "teardown"
        self._item.ihook.pytest_runtest_logreport(report=report)

    def _show_output(self, report: pytest.TestReport) -> None:
        """Write what the test has printed, if the options do not leave it to the report."""
        capture = self._item.config.getoption("capture", None)
        if capture in ("no", "tee-sys") and report.when == "teardown":
            sys.stdout.write("".join(text for _, text in report.sections))
        if capture == "no":
            report.sections = []


def _make_order(item: pytest.Item, lease: Lease) -> dict[str, Any]:
    """Return the arguments of ``run_test``."""
    config, given = item.config, item.config.invocation_params
    # What a test prints comes with its reports, and its coverage is nobody's.
    args = [*map(str, given.args)]
    args += ["--capture=fd"] if config.getoption("capture", None) == "no" else []
    args += ["--no-cov"] if config.getoption("no_cov", None) is not None else []
    # Below that of this run: a process removes what its own contains.
    temporary = getattr(config, "_tmp_path_factory", None)
    return {
        "args": args,
        "plugins": [each for each in given.plugins or () if isinstance(each, str)],
        "directory": str(given.dir),
        "environment": dict(os.environ),
        "worker_input": _worker_input(config),
        "base_temp": None if temporary is None else str(temporary.mktemp("isolated")),
        "path": str(item.path),
        "names": names_of(item),
        "node_id": item.nodeid,
        "lease": lease,
    }


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _worker_input(config: pytest.Config) -> dict[str, Any]:
    """Return ``workerinput``, by which plugins know that a process writes no reports of its own."""
    if is_worker(config):
        # Without our own part, a channel, which is this process's own.
        return {name: each for name, each in config.workerinput.items() if name != KEY}  # type: ignore[attr-defined]
    given = {"workerid": "master", "workercount": 1, "testrunuid": uuid.uuid4().hex, "mainargv": sys.argv}
    node = SimpleNamespace(config=config, workerinput=given, gateway=SimpleNamespace(id="master"))
    # Plugins that know pytest-xdist add what their part in a worker reads.
    hook = getattr(config.hook, "pytest_configure_node", None)
    for each in hook.get_hookimpls() if hook is not None else ():
        # One that needs a real worker, such as pytest-cov, has nothing to tell this process.
        with suppress(Exception):
            each.function(node)
    return given
