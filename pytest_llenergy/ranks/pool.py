# SPDX-License-Identifier: Apache-2.0
"""Warm ranks: one group at a time, which stays for the next tests as long as they can share it.

Ranks that ran only tasks of a backend serve the whole run. Ranks that ran functions of a test serve the tests
of its file until one fails: what its own functions leave behind there is the file's own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_llenergy.backends.base import BackendSpec, BackendWorker
from pytest_llenergy.backends.convert import convert_in_subprocess
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import LLEnergyError, WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.failure import OutcomeInRank
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host, StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import (
    LOCALHOST,
    ProcessPlan,
    RankPlan,
    check_backend_workers,
    inherited_environment,
)
from pytest_llenergy.record.record import BackendInfo

#: Which tests share ranks: none; those that the rule above allows; all, which then replace the model.
Isolation = Literal["test", "module", "run"]


@dataclass(frozen=True)
class Load:
    """What ranks load: a backend with a model and load options."""

    spec: BackendSpec
    model: ModelSource
    options: Mapping[str, Any]

    def payload(self) -> dict[str, Any]:
        """Return the request to the ranks, after conversions that need packages of pytest's interpreter."""
        converts = self.spec.python is not None and self.spec.reads == "directory"
        model = convert_in_subprocess(self.model) if converts else self.model
        return {"factory": self.spec.factory, "model": asdict(model), "options": self.options}


@dataclass
class _WarmGroup:
    """A group of ranks, and the requirements of a test that can share it."""

    group: RankGroup
    surroundings: object
    load: Load | None = None
    info: BackendInfo | None = None
    #: Whether they ran functions of tests, and whether one of these tests has failed.
    ran_functions: bool = False
    spent: bool = False


class RankPool:
    """Holds at most one living group, for tests with equal plans, environments and loads.

    Another thread may close ranks that no test uses. ``timeout_s`` limits the load of a model.
    """

    def __init__(self, timeout_s: float, start_method: StartMethod, isolation: Isolation) -> None:
        self._timeout_s = timeout_s
        self._isolation = isolation
        self._localhost = LocalHost(start_method)
        self._hosts: dict[str, Host] = {LOCALHOST: self._localhost}
        self._shared: _WarmGroup | None = None
        self._lock = threading.RLock()
        self._file = ""
        #: Open files of the device lease that new ranks run under.
        self.descriptors: tuple[int, ...] = ()

    @property
    def devices(self) -> frozenset[str]:
        """The devices of living ranks on pytest's own host."""
        here = [rank for rank in self._living_plan() if rank.host == LOCALHOST]
        return frozenset(device for rank in here for device in rank.devices)

    def uses(self, hosts: Collection[str]) -> bool:
        """Return whether ranks live on hosts of these names."""
        return any(rank.host in hosts for rank in self._living_plan())

    def use_hosts(self, hosts: Mapping[str, Host]) -> None:
        """Set the other hosts, by name, that plans may name. Closes ranks on hosts no longer among them."""
        with self._lock:
            named = {LOCALHOST: self._localhost, **hosts}
            if any(named.get(rank.host) is not self._hosts[rank.host] for rank in self._living_plan()):
                self._close_group()
            self._hosts = named

    def begin_test(self, file: str) -> None:
        """Close ranks that the next test, in this file, does not share: they must not run beside it."""
        with self._lock:
            shared, leaves_file = self._shared, self._isolation == "module" and file != self._file
            self._file = file
            if shared is not None and shared.ran_functions and (shared.spent or leaves_file):
                self._close_group()

    def note_failure(self) -> None:
        """Let no later test share ranks that ran functions of the present one, which has failed."""
        if (shared := self._shared) is not None:
            shared.spent = shared.ran_functions

    def get_ranks(self, plan: ProcessPlan, check: Callable[[], object] = lambda: None) -> RankGroup:
        """Return ranks for functions. ``check`` raises if the caller may no longer use ranks."""
        with self._lock:
            check()
            shared = self._share_or_start(plan, None)
            shared.ran_functions = True
            return shared.group

    def start_alone(self, plan: ProcessPlan) -> RankGroup:
        """Start ranks that no other test gets, beside those of the pool; the caller kills them."""
        with self._lock:
            return RankGroup(plan, self._hosts, self.descriptors)

    def get_loaded(
        self, plan: ProcessPlan, load: Load, check: Callable[[], object] = lambda: None
    ) -> tuple[RankGroup, BackendInfo]:
        """Return ranks with a loaded model, and its description. See ``get_ranks``."""
        with self._lock:
            check()
            shared = self._share_or_start(plan, load)
            if shared.info is None or shared.load != load:
                shared.info, shared.load = self._load(shared.group, load), load
            return shared.group, shared.info

    def finish_test(self) -> None:
        """Keep the ranks for the next test, or close them if no other test may share them."""
        with self._lock:
            shared = self._shared
            if shared is None:
                return
            if self._isolation == "test" or shared.spent:
                self._close_group()
                return
            # Whatever the reason, ranks that fail now are not used again: the request kills them.
            with suppress(LLEnergyError, OutcomeInRank):
                shared.group.request_all("clean_up", None, timeouts.CLEANUP_TIMEOUT_S)
            # The next test will not have waited for start and load.
            shared.group.start_s = 0.0
            if shared.info is not None:
                shared.info = msgspec.structs.replace(shared.info, load_s=0.0)

    def kill(self) -> None:
        """Kill the ranks at once, also while another thread waits for their answers."""
        if (shared := self._shared) is not None:
            # Before taking the lock, which a thread that loads a model may hold.
            shared.group.kill()
        with self._lock:
            if self._shared is not None:
                self._shared.group.kill()

    def close(self) -> None:
        """Close the ranks, and what pytest's own host has started for them."""
        with self._lock:
            self._close_group()
            self._localhost.close()

    def close_on(self, devices: Collection[str]) -> None:
        """Close the ranks if they occupy one of these devices."""
        with self._lock:
            if not self.devices.isdisjoint(devices):
                self._close_group()

    def _living_plan(self) -> tuple[RankPlan, ...]:
        shared = self._shared
        return shared.group.plan.ranks if shared is not None and shared.group.alive else ()

    def _share_or_start(self, plan: ProcessPlan, load: Load | None) -> _WarmGroup:
        shared, surroundings = self._shared, _surroundings()
        # Ranks that died since the last test are replaced, without an error for this one.
        if shared is not None and shared.group.alive and not shared.group.has_dead_rank:
            same = shared.group.plan == plan and shared.surroundings == surroundings
            if same and (shared.load == load or self._isolation == "run"):
                return shared
        self._close_group()
        self._shared = _WarmGroup(RankGroup(plan, self._hosts, self.descriptors), surroundings)
        return self._shared

    def _load(self, group: RankGroup, load: Load) -> BackendInfo:
        try:
            answers = group.request_all("load", load.payload(), self._timeout_s)
        except WorkerError as error:
            error.args = (f"loading {load.model.label} with {load.spec.name}: {error.args[0]}",)
            raise
        try:
            workers = [msgspec.json.decode(answer, type=list[BackendWorker]) for _, answer in answers]
            group.ranks = check_backend_workers(group.plan, group.ranks, workers)
        except BaseException:
            group.kill()
            raise
        return msgspec.json.decode(answers[0][0], type=BackendInfo)

    def _close_group(self) -> None:
        if self._shared is not None:
            self._shared.group.close()
            self._shared = None


def _surroundings() -> tuple[object, ...]:
    """Return what ranks inherit of this process when they start."""
    directory = None
    # It may have been removed.
    with suppress(OSError):
        directory = Path.cwd()
    return inherited_environment(), directory, list(sys.path)
