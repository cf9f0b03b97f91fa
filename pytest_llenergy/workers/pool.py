# SPDX-License-Identifier: Apache-2.0
"""Ranks that stay for the next test: one group at a time, kept while tests ask for the same one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import ProcessPlan


@dataclass(frozen=True)
class Load:
    """What the ranks have loaded: a backend with a model and its options."""

    spec: BackendSpec
    model: ModelSource
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, spec: BackendSpec, model: ModelSource, options: Mapping[str, Any]) -> Load:
        """Options in a fixed order, so that equal ones compare equal."""
        return cls(spec, model, tuple(sorted(options.items())))


class RankPool:
    """Holds at most one live group. Equal plan and equal load mean the group is used again.

    ``descriptors`` are those of the lease of GPUs that new ranks run under. Ranks that nobody uses may be
    ended from another thread, by ``end``.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: RankGroup | None = None
        self._key: tuple[ProcessPlan, Load | None] | None = None
        self._info: BackendInfo | None = None
        self._lock = threading.RLock()
        self.descriptors: tuple[int, ...] = ()

    @property
    def devices(self) -> frozenset[str]:
        """Those that live ranks are on."""
        group = self._group
        if group is None or not group.alive:
            return frozenset()
        return frozenset(rank.device for rank in group.plan.ranks)

    def group(self, plan: ProcessPlan) -> RankGroup:
        """Ranks without a backend."""
        group, _ = self._get(plan, None)
        return group

    def loaded(self, plan: ProcessPlan, load: Load) -> tuple[RankGroup, BackendInfo]:
        """Ranks with a model, and what they say about it."""
        group, info = self._get(plan, load)
        assert info is not None
        return group, info

    def close(self) -> None:
        """End what is running."""
        with self._lock:
            if self._group is not None:
                self._group.close()
            self._group = self._key = self._info = None

    def end(self, devices: Collection[str]) -> None:
        """End what is running on one of these devices."""
        with self._lock:
            if not self.devices.isdisjoint(devices):
                self.close()

    def _get(self, plan: ProcessPlan, load: Load | None) -> tuple[RankGroup, BackendInfo | None]:
        with self._lock:
            return self._locked_get(plan, load)

    def _locked_get(self, plan: ProcessPlan, load: Load | None) -> tuple[RankGroup, BackendInfo | None]:
        if self._group is not None and self._group.alive and self._key == (plan, load):
            return self._group, self._info
        self.close()
        group = RankGroup(plan, self.descriptors)
        info = None
        if load is not None:
            payload = {
                "factory": load.spec.factory,
                "model": asdict(load.model),
                "options": dict(load.options),
            }
            try:
                answers = group.ask_all("load", payload, self._timeout_s)
            except WorkerError as error:
                what = f"loading {load.model.label} with {load.spec.name}"
                raise WorkerError(f"{what}: {error.args[0]}", error.details) from None
            info = msgspec.json.decode(answers[0], type=BackendInfo)
        self._group, self._key, self._info = group, (plan, load), info
        return group, info
