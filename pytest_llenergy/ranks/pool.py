# SPDX-License-Identifier: Apache-2.0
"""Warm ranks: one group at a time, which stays for the next tests as long as they can share it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendSpec, BackendWorker
from pytest_llenergy.backends.convert import convert_draft_model, convert_in_subprocess
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import LLEnergyError, WorkerError, warn_caller
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.isolation import Isolation, has_grown
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import (
    LOCALHOST,
    ProcessPlan,
    Surroundings,
    check_backend_workers,
    current_surroundings,
    find_hazards,
)
from pytest_llenergy.ranks.start_method import StartMethod
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.text import one_line


@dataclass(frozen=True)
class Load:
    """What ranks load: a backend with a model and load options."""

    spec: BackendSpec
    model: ModelSource
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_options(cls, spec: BackendSpec, model: ModelSource, options: Mapping[str, Any]) -> Load:
        """Sort the options, so that equal ones compare equal.

        Args:
            spec: The backend.
            model: The model.
            options: Load options by name.
        """
        return cls(spec, model, tuple(sorted(options.items())))

    def payload(self) -> dict[str, Any]:
        """Return the request to the ranks.

        Raises:
            ModelError: If a needed conversion fails.
        """
        converts = self.spec.python is not None and self.spec.reads == "directory"
        model = convert_in_subprocess(self.model) if converts else self.model
        options = dict(self.options)
        return {
            "factory": self.spec.factory,
            "model": asdict(model),
            "options": convert_draft_model(options) if converts else options,
        }


@dataclass(frozen=True)
class _Attempt:
    """A start of ranks, or a load in ranks: equal ones fail alike."""

    plan: ProcessPlan
    surroundings: Surroundings
    load: Load | None = None


@dataclass
class _WarmGroup:
    """A group of ranks, and the requirements of a test that can share it."""

    group: RankGroup
    plan: ProcessPlan
    surroundings: Surroundings
    load: Load | None = None
    info: BackendInfo | None = None
    #: Memory of each rank after its first test (bytes).
    memory_bytes: tuple[int | None, ...] | None = None


class _FailedAttempts:
    """Starts and loads that failed in this run, which would only fail again and may cost minutes."""

    def __init__(self) -> None:
        self._failed: list[tuple[_Attempt, LLEnergyError]] = []
        #: Those that may succeed the next time.
        self._once: list[_Attempt] = []

    def check(self, attempt: _Attempt) -> None:
        """Raise the error of an equal attempt again, as one line."""
        for each, error in self._failed:
            if each == attempt:
                again = copy.copy(error)
                verb = "started" if attempt.load is None else "loaded"
                again.args = (f"not {verb} again: {error.args[0]}",)
                if isinstance(again, WorkerError):
                    again.details, again.sections = "", ()
                raise again

    def add(self, attempt: _Attempt, error: LLEnergyError) -> None:
        """Remember a failure, a transient one only if it is the second in succession."""
        if getattr(error, "is_transient", False) and attempt not in self._once:
            self._once.append(attempt)
        else:
            # A copy without its traceback, which would keep the test alive.
            self._failed.append((attempt, copy.copy(error)))

    def remove(self, attempt: _Attempt) -> None:
        """Forget the first failure of an attempt that has now succeeded."""
        if attempt in self._once:
            self._once.remove(attempt)


def _allow() -> None:
    """Allow every caller to use ranks."""


class RankPool:
    """Holds at most one living group, for tests with equal plans, environments and loads.

    Another thread may close ranks that no test uses. ``descriptors`` are the open files of the device lease
    that new ranks run under.

    Args:
        timeout_s: Time limit for loading a model.
        start_method: How ranks start.
        isolation: Which tests share ranks.
        logs: Directory that keeps the ranks' output.
    """

    def __init__(
        self,
        timeout_s: float,
        start_method: StartMethod,
        isolation: Isolation,
        logs: Path | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._isolation = isolation
        self._localhost = LocalHost(start_method, logs)
        self._hosts: dict[str, Host] = {LOCALHOST: self._localhost}
        self._shared: _WarmGroup | None = None
        self._failed = _FailedAttempts()
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._leftovers: list[str] = []
        self.descriptors: tuple[int, ...] = ()

    @property
    def devices(self) -> frozenset[str]:
        """The devices of living ranks on pytest's own host."""
        shared = self._shared
        if shared is None or not shared.group.alive:
            return frozenset()
        here = [rank for rank in shared.plan.ranks if rank.host == LOCALHOST]
        return frozenset(device for rank in here for device in rank.devices)

    def uses(self, hosts: Collection[str]) -> bool:
        """Return whether ranks live on these hosts.

        Args:
            hosts: Names of hosts.
        """
        shared = self._shared
        return shared is not None and shared.group.alive and not set(hosts).isdisjoint(shared.plan.hosts)

    def use_hosts(self, hosts: Mapping[str, Host]) -> None:
        """Set the other hosts that plans may name. Closes ranks on hosts that are no longer among them.

        Args:
            hosts: Each host by its name. The caller closes them after the pool.
        """
        with self._lock:
            shared, named = self._shared, {LOCALHOST: self._localhost, **hosts}
            if shared is not None and any(
                named.get(name) is not self._hosts[name] for name in shared.plan.hosts
            ):
                self._close_group()
            self._hosts = named

    def get_ranks(self, plan: ProcessPlan, check: Callable[[], None] = _allow) -> RankGroup:
        """Return ranks without a backend. ``check`` raises if the caller may no longer use ranks."""
        with self._lock:
            check()
            return self._share_or_start(plan, None).group

    def get_loaded(
        self, plan: ProcessPlan, load: Load, check: Callable[[], None] = _allow
    ) -> tuple[RankGroup, BackendInfo]:
        """Return ranks with a loaded model, and its description. See ``get_ranks``.

        Args:
            plan: The plan of the ranks.
            load: What they load.
            check: Raises if the caller may no longer use ranks.
        """
        with self._lock:
            check()
            attempt = _Attempt(plan, current_surroundings(), load)
            self._failed.check(attempt)
            shared = self._share_or_start(plan, load)
            if shared.load != load:
                start_s = time.monotonic()
                try:
                    shared.info, shared.load = self._load(shared.group, load), load
                except LLEnergyError as error:
                    if time.monotonic() - start_s >= timeouts.SLOW_LOAD_S:
                        self._failed.add(attempt, error)
                    raise
                self._failed.remove(attempt)
                shared.memory_bytes = None
            assert shared.info is not None
            return shared.group, shared.info

    def finish_test(self) -> None:
        """Keep the ranks for the next test if they are clean; otherwise close them."""
        with self._lock:
            shared = self._shared
            if shared is None:
                return
            self._leftovers = [] if self._isolation == "test" else self._find_leftovers(shared)
            if self._isolation == "test" or self._leftovers or not shared.group.alive:
                self._close_group()
                return
            # The next test will not have waited for start and load.
            shared.group.start_s, shared.group.leftovers = 0.0, []
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
                self._shared = None

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

    def _share_or_start(self, plan: ProcessPlan, load: Load | None) -> _WarmGroup:
        shared, now = self._shared, current_surroundings()
        # Ranks that died since the last test are replaced, without an error for this one.
        if shared is not None and shared.group.alive and not shared.group.has_dead_rank:
            same = shared.plan == plan and shared.surroundings == now
            if same and (shared.load == load or self._isolation == "run"):
                return shared
        self._close_group()
        attempt = _Attempt(plan, now)
        self._failed.check(attempt)
        self._warn_of_hazards()
        try:
            group = RankGroup(plan, self._hosts, self.descriptors, now.environment)
        except WorkerError as error:
            self._failed.add(attempt, error)
            raise
        self._failed.remove(attempt)
        group.leftovers, self._leftovers = self._leftovers, []
        self._shared = _WarmGroup(group, plan, now)
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

    def _find_leftovers(self, shared: _WarmGroup) -> list[str]:
        """Clean up the ranks. Return what then still differs from their state before the test."""
        if not shared.group.alive:
            return []
        try:
            answers = shared.group.request_all("clean_up", None, timeouts.CLEANUP_TIMEOUT_S)
        except Exception as error:
            # Whatever the reason, these ranks are not used again.
            return [f"a state that cannot be cleaned up ({one_line(str(error))})"]
        memory = tuple(each for each, _ in answers)
        left = dict.fromkeys(description for _, found in answers for description in found)
        if not left and shared.memory_bytes is None:
            shared.memory_bytes = memory
        grown = [
            has_grown(now, first) for now, first in zip(memory, shared.memory_bytes or memory, strict=True)
        ]
        return [*left, *(["more memory in use"] if any(grown) else [])]

    def _close_group(self) -> None:
        if self._shared is not None:
            self._shared.group.close()
            self._shared = None

    def _warn_of_hazards(self) -> None:
        for hazard in find_hazards():
            if hazard not in self._warned:
                self._warned.add(hazard)
                warn_caller(hazard)
