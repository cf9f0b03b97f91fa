# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay for the next test: one group at a time, kept while tests can share it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_llenergy.backends.base import BackendSpec, BackendWorker
from pytest_llenergy.backends.convert import convert_in_subprocess
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.errors import LLEnergyWarning, PlanError, WorkerError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.host import Host, StartMethod
from pytest_llenergy.workers.local import LocalHost
from pytest_llenergy.workers.plan import (
    LOCALHOST,
    ProcessPlan,
    Surroundings,
    check_backend_workers,
    current_surroundings,
    find_hazards,
)

Isolation = Literal["test", "backend", "run"]

#: How much more memory than after their first test ranks may keep: the larger of these (bytes, share).
GROWTH_BYTES, GROWTH_SHARE = 256 << 20, 0.25

#: How long ranks may take to clean up after a test (seconds).
REST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Load:
    """What the ranks have loaded: a backend with a model and its options."""

    spec: BackendSpec
    model: ModelSource
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_options(cls, spec: BackendSpec, model: ModelSource, options: Mapping[str, Any]) -> Load:
        """Options in a fixed order, so that equal ones compare equal."""
        return cls(spec, model, tuple(sorted(options.items())))

    def payload(self) -> dict[str, Any]:
        """As ranks are told. Raises ``ModelError`` when the model has to be converted for them and cannot."""
        elsewhere = self.spec.python is not None and self.spec.reads == "directory"
        model = convert_in_subprocess(self.model) if elsewhere else self.model
        return {
            "factory": self.spec.factory,
            "model": asdict(model),
            "options": dict(self.options),
        }


@dataclass
class _Shared:
    """A live group and what a test must want to be given it."""

    group: RankGroup
    plan: ProcessPlan
    surroundings: Surroundings
    load: Load | None = None
    info: BackendInfo | None = None
    #: Of each rank after its first test (bytes).
    memory_bytes: tuple[int | None, ...] | None = None


def _ask_nobody() -> None:
    """Anybody may have ranks."""


class RankPool:
    """Holds at most one live group.

    It is used again by a test with an equal plan, environment and load. With the isolation ``test`` it ends
    with its test, with ``run`` it takes another load in place of its own. ``descriptors`` are those of the
    lease of GPUs that new ranks run under. Ranks that nobody uses may be ended from another thread, by
    ``end``.
    """

    def __init__(
        self,
        timeout_s: float,
        start_method: StartMethod = "spawn",
        isolation: Isolation = "backend",
        logs: Path | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._isolation = isolation
        self._hosts: dict[str, Host] = {LOCALHOST: LocalHost(start_method, logs)}
        self._shared: _Shared | None = None
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self.descriptors: tuple[int, ...] = ()

    @property
    def devices(self) -> frozenset[str]:
        """Those that live ranks are on."""
        shared = self._shared
        if shared is None or not shared.group.alive:
            return frozenset()
        return frozenset(device for rank in shared.plan.ranks for device in rank.devices)

    def get_ranks(self, plan: ProcessPlan, check: Callable[[], None] = _ask_nobody) -> RankGroup:
        """Ranks without a backend. ``check`` raises for who must not have any more."""
        with self._lock:
            check()
            return self._get(plan, None).group

    def get_loaded(
        self, plan: ProcessPlan, load: Load, check: Callable[[], None] = _ask_nobody
    ) -> tuple[RankGroup, BackendInfo]:
        """Ranks with a model, and what they say about it. ``check`` raises for who must not have any more."""
        with self._lock:
            check()
            shared = self._get(plan, load)
            if shared.load != load:
                shared.info, shared.load = self._loaded(shared.group, load), load
                shared.memory_bytes = None
            assert shared.info is not None
            return shared.group, shared.info

    def finish_test(self) -> None:
        """The test has ended: clean ranks stay for the next one, others are ended."""
        with self._lock:
            shared = self._shared
            if shared is None:
                return
            if self._isolation == "test" or not self._is_clean(shared):
                self._retire()
                return
            # The next test has not waited for them.
            shared.group.start_s = 0.0
            if shared.info is not None:
                shared.info = msgspec.structs.replace(shared.info, load_s=0.0)

    def kill(self) -> None:
        """End what is running now, also while another thread waits for its answer."""
        if (shared := self._shared) is not None:
            # Where it waits for a model to be loaded it holds the lock.
            shared.group.kill()
        with self._lock:
            if self._shared is not None:
                self._shared.group.kill()
                self._shared = None

    def close(self) -> None:
        """End what is running."""
        with self._lock:
            self._retire()
            for host in self._hosts.values():
                host.close()

    def close_on(self, devices: Collection[str]) -> None:
        """End what is running on one of these devices."""
        with self._lock:
            if not self.devices.isdisjoint(devices):
                self._retire()

    def _get(self, plan: ProcessPlan, load: Load | None) -> _Shared:
        if os.getpid() != self._owner:
            raise PlanError(
                f"the ranks of a test are started by its own process (pid {self._owner}); a forked child "
                "of it cannot have any"
            )
        shared, now = self._shared, current_surroundings()
        # What has ended them since the last test is no fault of this one.
        if shared is not None and shared.group.alive and not shared.group.has_dead_rank:
            same = shared.plan == plan and shared.surroundings == now
            if same and (shared.load == load or self._isolation == "run"):
                return shared
        self._retire()
        self._warn_of_hazards()
        group = RankGroup(plan, self._hosts, self.descriptors, now.environment)
        self._shared = _Shared(group, plan, now)
        return self._shared

    def _loaded(self, group: RankGroup, load: Load) -> BackendInfo:
        try:
            answers = group.request_all("load", load.payload(), self._timeout_s)
        except WorkerError as error:
            error.args = (f"loading {load.model.label} with {load.spec.name}: {error.args[0]}",)
            raise
        try:
            workers = [msgspec.json.decode(told, type=list[BackendWorker]) for _, told in answers]
            group.ranks = check_backend_workers(group.plan, group.ranks, workers)
        except BaseException:
            group.kill()
            raise
        return msgspec.json.decode(answers[0][0], type=BackendInfo)

    def _is_clean(self, shared: _Shared) -> bool:
        """Whether the ranks are as they were before the test, as far as can be seen."""
        if not shared.group.alive:
            return False
        try:
            found = shared.group.request_all("rest", None, REST_TIMEOUT_S)
        except Exception:
            # Whatever it was, these ranks are not asked again.
            return False
        memory = tuple(each for each, _ in found)
        if any(altered for _, altered in found):
            return False
        if shared.memory_bytes is None:
            shared.memory_bytes = memory
        return not any(_has_grown(now, first) for now, first in zip(memory, shared.memory_bytes, strict=True))

    def _retire(self) -> None:
        if self._shared is not None:
            self._shared.group.close()
            self._shared = None

    def _warn_of_hazards(self) -> None:
        for hazard in find_hazards():
            if hazard not in self._warned:
                self._warned.add(hazard)
                warnings.warn(hazard, LLEnergyWarning, stacklevel=2)


def _has_grown(now: int | None, first: int | None) -> bool:
    if now is None or first is None:
        return False
    return now - first > max(GROWTH_BYTES, GROWTH_SHARE * first)
