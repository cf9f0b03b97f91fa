# SPDX-License-Identifier: Apache-2.0
"""A plain test with a mark ``gpus`` runs in a process of its own: pytest's part, which leases and reports.

What runs in that process is in ``isolated_child``.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks, xfailed_key

from pytest_llenergy import real_time
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import LLEnergyError, WorkerError
from pytest_llenergy.plugin.handles.context import raise_rank_outcomes
from pytest_llenergy.plugin.isolated_child import TestOrder, names_of, read_warning
from pytest_llenergy.plugin.leasing import falls_back, lease_devices
from pytest_llenergy.plugin.plan import plan_of, runs_in_ranks
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.stash import (
    GIVEN_LEASE,
    ISOLATED,
    NO_TERMINAL,
    is_worker,
    uses_energy,
    uses_fixture,
)
from pytest_llenergy.plugin.xdist import KEY
from pytest_llenergy.ranks.group import RankGroup
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
        process.report_failure(_attempt(lambda: process.run(stack), "setup"))

        def tear_down() -> None:
            try:
                stack.close()
            finally:
                ends = session.shouldfail or session.shouldstop
                session._setupstate.teardown_exact(None if ends else nextitem)

        process.report_end(_attempt(tear_down, "teardown"))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _attempt(work: Any, when: Any) -> pytest.CallInfo[None]:
    return pytest.CallInfo.from_call(work, when, reraise=(pytest.exit.Exception, KeyboardInterrupt))


class _TestProcess:
    """The process of one test, and the reports that came from it."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._phase = "setup"
        self._teardown: pytest.TestReport | None = None
        self._captured: list[tuple[str, IO[bytes]]] = []
        #: When this began; how long lease and start took, which the set-up's duration includes (seconds).
        self._begin_s, self._start_s = real_time.monotonic(), 0.0

    def run(self, stack: ExitStack) -> None:
        """Lease, start the process, and log its reports as they come.

        Args:
            stack: Gets what ends the process and the lease.

        Raises:
            LLEnergyError: The devices cannot be leased, the process died, or does not find the test.
        """
        state = state_of(self._item.config)
        lease = stack.enter_context(lease_devices(self._item, plan_of(self._item).gpus))
        # Ranks that wait for the next test hold memory there.
        state.pool.close_on(lease.uuids)
        group = state.pool.start_alone(plan_processes(ONE_PROCESS, None, lease, usable_cpus()))
        stack.callback(group.kill)
        group.on_message = lambda message: self._take(group, *message)
        order = _make_order(self._item, lease)
        try:
            with raise_rank_outcomes():
                call_workload(group, CHILD, (order,), {}, state.settings.timeout).work()
        except WorkerError as error:
            how = re.sub(r"^rank 0 of 1 \([^)]*\):? ", "", error.args[0])
            error.args = (f"the process of the test, during {self._phase}: {how}",)
            sections = [(name, _read(file)) for name, file in self._captured]
            sections += [("output of its process", text) for _, text in error.sections]
            error.sections = tuple((title, text) for title, text in sections if text)
            raise

    def _take(self, group: RankGroup, kind: str, content: Any) -> None:
        """Handle a message of the process."""
        config, hook = self._item.config, self._item.ihook
        if kind == "phase":
            self._phase, descriptors = content
            if self._phase == "setup":
                self._start_s, self._begin_s = real_time.monotonic() - self._begin_s, real_time.monotonic()
            for name, number in () if self._captured else descriptors:
                file = Path(f"/proc/{group.ranks[0].pid}/fd/{number}")
                with suppress(OSError):
                    self._captured.append((name, file.open("rb")))
        elif kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=content)
            if report.when == "setup":
                report.start -= self._start_s
                report.duration += self._start_s
            self._log(report)
        elif kind == "warning":
            warning, when, location = content
            hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": read_warning(warning),
                    "nodeid": self._item.nodeid,
                    "when": when,
                    "location": location,
                }
            )
        elif kind == "end":
            session = self._item.session
            session.shouldfail = session.shouldfail or content["shouldfail"]
            session.shouldstop = session.shouldstop or content["shouldstop"]

    def _log(self, report: pytest.TestReport) -> None:
        option = self._item.config.getoption
        if option("capture", None) == "no":
            if report.when == "teardown":
                sys.stdout.write("".join(text for _, text in report.sections))
            report.sections = []
        if report.failed and (option("usepdb", False) or option("trace", False)):
            report.sections.append(("debugger", NO_TERMINAL))
        if self._teardown is not None:
            self._item.ihook.pytest_runtest_logreport(report=self._teardown)
        # The last one waits until this process has torn down what it had set up.
        self._teardown = report if report.when == "teardown" else None
        if self._teardown is None:
            self._item.ihook.pytest_runtest_logreport(report=report)

    def report_failure(self, call: pytest.CallInfo[None]) -> None:
        """Report what failed in this process, or ended the other one, in the phase that it was in."""
        if call.excinfo is not None:
            call.when = self._phase  # type: ignore[assignment]
            self._log(self._make_report(call))
        for _, file in self._captured:
            file.close()

    def report_end(self, call: pytest.CallInfo[None]) -> None:
        """Report the teardown, that of this process if it failed."""
        report = self._make_report(call) if call.excinfo or self._teardown is None else None
        for each in (self._teardown, report):
            if each is not None and (each is report or report is None or each.failed):
                self._item.ihook.pytest_runtest_logreport(report=each)

    def _make_report(self, call: pytest.CallInfo[None]) -> pytest.TestReport:
        item = self._item
        if call.excinfo is not None:
            with suppress(pytest.fail.Exception):
                item.stash[xfailed_key] = evaluate_xfail_marks(item)
        report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
        return report


def _make_order(item: pytest.Item, lease: Lease) -> TestOrder:
    given = item.config.invocation_params
    # What a test prints comes with its reports, and its coverage is nobody's.
    args = [*map(str, given.args)]
    args += ["--capture=fd"] if item.config.getoption("capture", None) == "no" else []
    args += ["--no-cov"] if item.config.getoption("no_cov", None) is not None else []
    # Below that of this run: a process removes what its own contains.
    temporary = getattr(item.config, "_tmp_path_factory", None)
    return TestOrder(
        args=tuple(args),
        plugins=tuple(each for each in given.plugins or () if isinstance(each, str)),
        directory=str(given.dir),
        environment=dict(os.environ),
        worker_input=_worker_input(item.config),
        base_temp=None if temporary is None else str(temporary.mktemp("isolated")),
        path=str(item.path),
        names=names_of(item),
        node_id=item.nodeid,
        lease=lease,
    )


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
