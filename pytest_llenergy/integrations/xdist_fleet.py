# SPDX-License-Identifier: Apache-2.0
"""What the controller of pytest-xdist knows of its workers: whose a test is, where they run, what is left.

A plugin object of the controller. Without xdist none of its hooks is ever called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import pytest_llenergy
from pytest_llenergy.errand import BEGINS, HAS, KEY, RUNS_ON, VERSION, Errand, record_id, whereabouts

#: What a baseline is called and what it holds, for workers that may not have the file.
Baseline = tuple[str, bytes]


class Fleet:
    """``baseline`` gives the one to compare with, for a worker that may not have the file."""

    def __init__(self, config: pytest.Config, baseline: Callable[[], Baseline | None]) -> None:
        self._config = config
        self._baseline = baseline
        # By the worker's specification, which a replacement shares with the one that it replaces.
        self._labels: dict[int, str] = {}
        self._all: dict[str | None, Sequence[str]] = {}
        self._seen: set[tuple[str | None, str]] = set()
        # What workers tell; noted in the thread that receives it, looked at when they have died.
        self._versions: dict[str, str] = {}
        self._has: dict[str, frozenset[str]] = {}
        self._begun: dict[tuple[str, str], int] = {}
        self._runs_on: dict[str, bytes] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Before a worker starts."""
        gateway = node.gateway
        spec = gateway.spec
        channel = gateway.newchannel()
        channel.setcallback(partial(self._hear, gateway.id))
        if self._each and node.workerinput["workercount"] > 1:
            self._labels.setdefault(id(spec), gateway.id)
        errand = Errand(
            channel=channel,
            label=self._labels.get(id(spec)),
            grouped=self._grouped,
            home=whereabouts(),
            # Those that start here, in this directory, read it themselves.
            baseline=None if spec.popen and not (spec.chdir or spec.via) else self._baseline(),
        )
        node.workerinput[KEY] = errand.packed()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Under ``--dist=each`` every worker has all tests to run, otherwise they share them.

        Raises ``pytest.UsageError`` for a worker that measures with another version of this package.
        """
        here = pytest_llenergy.__version__
        there = self._versions.get(node.gateway.id, here)
        if there != here:
            raise pytest.UsageError(
                f"worker {node.gateway.id} has pytest-llenergy {there}, this run was started with {here}: "
                "install the same version for both"
            )
        self._all.setdefault(self._label(node), ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has had its turn, also where its worker died."""
        node = getattr(report, "node", None)
        if node is not None:
            self._seen.add((self._label(node), report.nodeid))

    @property
    def left_out(self) -> bool:
        """Whether a test has had no turn, as when too many workers died."""
        return any((label, name) not in self._seen for label, ids in self._all.items() for name in ids)

    def begun(self, node: Any, node_id: str) -> int | None:
        """Which attempt a worker was at when it died; ``None`` for a test that measures nothing.

        xdist names the test that was next where none was running: its first attempt is lost.
        """
        worker = node.gateway.id
        attempt = self._begun.get((worker, node_id))
        return 1 if attempt is None and node_id in self._has.get(worker, ()) else attempt

    def record_id(self, node: Any, node_id: str) -> str:
        """How its record is called."""
        return record_id(node_id, label=self._label(node), grouped=self._grouped)

    def runs_on(self, node: Any) -> bytes | None:
        """The environment that a worker has told; ``None`` for one that runs where this process does."""
        return None if node is None else self._runs_on.get(node.gateway.id)

    @property
    def _each(self) -> bool:
        return bool(self._config.getoption("dist", "no") == "each")

    @property
    def _grouped(self) -> bool:
        return bool(self._config.getoption("dist", "no") == "loadgroup")

    def _label(self, node: Any) -> str | None:
        return self._labels.get(id(node.gateway.spec))

    def _hear(self, worker: str, message: tuple[str, Any]) -> None:
        kind, content = message
        if kind == VERSION:
            self._versions[worker] = content
        elif kind == HAS:
            self._has[worker] = frozenset(content)
        elif kind == BEGINS:
            node_id, attempt = content
            self._begun[worker, node_id] = attempt
        elif kind == RUNS_ON:
            self._runs_on[worker] = content
