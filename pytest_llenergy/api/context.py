# SPDX-License-Identifier: Apache-2.0
"""The context that the fixtures of one test share: its plan, lease, ranks and meters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import shorten
from threading import RLock
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.draft import Draft
from pytest_llenergy.errors import MeterError, PlanError
from pytest_llenergy.measure.host_meters import HostMeters
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.meters.base import Targets
from pytest_llenergy.meters.select import Selection, open_meters
from pytest_llenergy.meters.window_meters import LocalWindows, WindowMeters
from pytest_llenergy.model.record import Flag
from pytest_llenergy.model.text import one_line
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plan import TestPlan
from pytest_llenergy.session import RunState
from pytest_llenergy.workers.failure import OutcomeInRank
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import ProcessPlan, plan_on_hosts, plan_processes
from pytest_llenergy.workers.timeouts import THREAD_TIMEOUT_S

if TYPE_CHECKING:
    from pytest_llenergy.cluster.meter_client import Opened
    from pytest_llenergy.gangs import GangLease

#: Most characters of the leftovers of an earlier test, such as command lines.
MAX_DETAIL = 300


@contextmanager
def raise_rank_outcomes() -> Iterator[None]:
    """Raise pytest outcomes of ranks, such as a skip, as outcomes of this process."""
    try:
        yield
        return
    except OutcomeInRank as error:
        outcome, reason, exit_code = error.outcome, error.reason, error.exit_code
    # Outside the except block, or pytest would show the rank's error as well.
    if outcome == "Skipped":
        # ``pytest.skip`` would report this line as the location of the skip.
        raise pytest.skip.Exception(reason, _use_item_location=True)
    if outcome == "XFailed":
        pytest.xfail(reason)
    if outcome == "Exit":
        pytest.exit(reason, exit_code)
    if outcome == "KeyboardInterrupt":
        raise KeyboardInterrupt(reason)
    pytest.fail(reason, pytrace=False)


@dataclass(repr=False)
class TestContext:
    """Context that the fixtures of one test share: its plan, lease and draft, and the state of the run."""

    __test__ = False  # pytest would collect a class of this name

    state: RunState
    plan: TestPlan
    lease: Lease
    draft: Draft
    node_id: str
    #: Whether the test has ended. Objects that outlive it must not use devices that others may lease again.
    over: bool = False
    #: Held while a thread uses the ranks.
    lock: RLock = field(default_factory=RLock)

    @property
    def settings(self) -> Settings:
        """Options of the run."""
        return self.state.settings

    def plan_ranks(self, capabilities: Capabilities, python: str | None = None) -> ProcessPlan:
        """Plan the rank processes of a backend with these capabilities, in the interpreter ``python``.

        Raises:
            PlanError: The test has ended, or its degrees do not fit its devices.
        """
        self.check_running()
        threads, parallel, gang = self.settings.threads, self.plan.parallel, self.draft.gang
        if gang is None:
            return plan_processes(capabilities, parallel, self.lease, usable_cpus(), threads, python)
        crosses = self.draft.request is not None and self.draft.request.tensor_across_hosts
        return plan_on_hosts(capabilities, parallel, gang.hosts, threads, python, tensor_across_hosts=crosses)

    def check_running(self) -> None:
        """Raise ``PlanError`` if the test has ended."""
        if self.over:
            raise PlanError(
                "the test of these workers has ended; use the fixtures in the test that asks for them"
            )

    def end(self) -> None:
        """End the test's use of ranks, and kill them if one of its threads still uses them."""
        self.over = True
        if not self.lock.acquire(blocking=False):
            self.state.pool.kill()
            # Wait until the thread notices. It may continue in this process for ever, for example pickling,
            # but its ranks are gone and it gets no others.
            if not self.lock.acquire(timeout=THREAD_TIMEOUT_S):
                return
        self.lock.release()

    def record_ranks(self, group: RankGroup) -> None:
        """Describe the ranks in the draft, unless the test was already measured, with other ranks."""
        draft, plan = self.draft, group.plan
        if draft.experiment is None:
            draft.parallel, draft.launch, draft.start_method = plan.parallel, plan.launch, group.start_method
            draft.ranks, draft.start_s = group.ranks, group.start_s
            if group.leftovers and all(flag.name != "ranks-replaced" for flag in draft.flags):
                left = shorten(one_line(", ".join(group.leftovers)), MAX_DETAIL, placeholder=" …")
                detail = f"the ranks are new, because an earlier test left behind: {left}"
                draft.flags.append(Flag(name="ranks-replaced", severity="note", detail=detail))


def open_host_meters(context: TestContext) -> Sequence[HostMeters]:
    """Open the meters of every host that a test uses; raises as ``open_test_meters`` does, and

    Raises:
        WorkerError: Another host is lost.
    """
    gang = context.draft.gang
    if gang is None:
        return [LocalMeters(open_test_meters(context), context.lease.uuids)]
    from pytest_llenergy.cluster.remote_meters import RemoteMeters

    return _open_on(gang, context, RemoteMeters)


def open_window_meters(context: TestContext) -> Sequence[WindowMeters]:
    """Open the meters of every host that a test uses, for windows; raises as ``open_host_meters`` does."""
    gang = context.draft.gang
    if gang is None:
        return [LocalWindows(open_test_meters(context))]
    from pytest_llenergy.cluster.remote_windows import RemoteWindows

    return _open_on(gang, context, RemoteWindows)


def _open_on(gang: GangLease, context: TestContext, kind: type[Opened]) -> list[Opened]:
    """Open the meters of all hosts of a gang, also those that only pytest's conftest files define."""
    from pytest_llenergy.cluster.meter_client import open_remote_meters

    settings = context.settings
    named = [name.partition(":")[0] for name in settings.meter]
    specs = [
        each for each in context.state.hook_meters if each.name in named or (not named and each.by_default)
    ]
    measured = settings.require == "measured"
    return open_remote_meters(kind, gang.boards, settings.meter, require_measured=measured, specs=specs)


def open_test_meters(context: TestContext) -> Selection:
    """Open the meters for the devices of a test on this host.

    If no meter was requested and the host has none, the selection is empty and names the reason; the test's
    record then has no energy.

    Raises:
        MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
    """
    settings = context.settings
    required = settings.require == "measured"
    targets = find_targets(context)
    context.state.await_counter_check()
    try:
        return open_meters(settings.meter, context.state.meters, targets, require_measured=required)
    except MeterError as error:
        if required or settings.meter:
            raise
        return Selection((), (str(error),))


def find_targets(context: TestContext) -> Targets:
    """Return what the meters of a test must cover."""
    draft = context.draft
    targets = Targets(context.lease.uuids, also_cpu=draft.in_process and draft.request is None)
    family = context.state.server if targets.cpu and context.plan.backend == server.SPEC.name else None
    if family is None:
        return targets
    processes = () if family.root is None else (family.root,)
    return targets._replace(processes=processes, unknown_processes=family.reason)
