# SPDX-License-Identifier: Apache-2.0
"""Everything for pytest-xdist: worker count, data for workers, their records."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_llenergy
from pytest_llenergy.options import read_settings

if TYPE_CHECKING:
    from pytest_llenergy.model.record import Flag


# What the controller of pytest-xdist gives its workers along, and what they send back beside test reports.
#
# The way back is a channel of execnet, which a worker finds in its ``workerinput``. What is sent has left the
# worker when the call returns, so nothing that was said is lost when it dies.

#: Our place in ``workerinput``.
KEY = "llenergy"

#: What a worker tells: its version of this package, tests that it has and that measure, one that begins,
#: what it runs on.
VERSION, HAS, BEGINS, RUNS_ON = "version", "has", "begins", "runs-on"

#: The flag of what was not measured where its run was started.
ELSEWHERE = "elsewhere"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Errand:
    """One worker's. ``label`` tells its records from those of others that run the same tests.

    ``baseline`` is the name and the content of the one to compare with, where the worker may not have the
    file. ``home`` is where the controller runs.
    """

    channel: Any = None
    label: str | None = None
    grouped: bool = False
    home: tuple[str, ...] = ()
    baseline: tuple[str, bytes] | None = None
    _told_where: bool = field(default=False, init=False)

    def packed(self) -> dict[str, object]:
        """As execnet carries it."""
        return {
            "channel": self.channel,
            "label": self.label,
            "grouped": self.grouped,
            "home": self.home,
            "baseline": self.baseline,
        }

    def tell_tests(self, node_ids: Sequence[str]) -> None:
        """That these will measure, as far as can be seen. Where that is first: it may die here."""
        self._send(VERSION, pytest_llenergy.__version__)
        self._tell_where()
        self._send(HAS, list(node_ids))

    def tell_begin(self, node_id: str, attempt: int) -> None:
        """That one begins which measures."""
        self._tell_where()
        self._send(BEGINS, [node_id, attempt])

    def _tell_where(self) -> None:
        """Once, before anything that makes a record of this worker."""
        if self.elsewhere is None or self._told_where:
            return
        import msgspec

        from pytest_llenergy.report.provenance import collect_environment

        self._told_where = True
        self._send(RUNS_ON, msgspec.json.encode(collect_environment()))

    @property
    def elsewhere(self) -> str | None:
        """Where this process runs; ``None`` where its controller does, in the same Python."""
        if not self.home or self.home == whereabouts():
            return None
        host, _, version, prefix = whereabouts()
        return f"on {host} with Python {version} in {prefix}"

    @property
    def flags(self) -> list[Flag]:
        """What a record must say of it."""
        if self.elsewhere is None:
            return []
        from pytest_llenergy.model.record import Flag

        detail = (
            f"measured {self.elsewhere}; the run was started on {self.home[0]} with Python {self.home[2]}"
        )
        return [Flag(name=ELSEWHERE, severity="note", detail=detail)]

    def _send(self, kind: str, content: object) -> None:
        # A controller that is gone wants to know nothing.
        with suppress(OSError):
            if self.channel is not None:
                self.channel.send((kind, content))


NONE = Errand()
ERRAND = pytest.StashKey[Errand]()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for a controller."""
    return hasattr(config, "workerinput")


def errand_of(config: pytest.Config) -> Errand:
    """That of this process; an empty one where it is no worker."""
    if not hasattr(config, "workerinput"):
        return NONE
    if ERRAND not in config.stash:
        packed = config.workerinput.get(KEY)
        # A controller of another version may give more along. It refuses the worker when that says its own.
        known = {name: value for name, value in (packed or {}).items() if name in NONE.packed()}
        config.stash[ERRAND] = Errand(**known)
    return config.stash[ERRAND]


@lru_cache(maxsize=1)
def whereabouts() -> tuple[str, ...]:
    """Host, boot, version of Python and environment: equal for two processes that are at one place."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return platform.node(), boot, platform.python_version(), sys.prefix


def record_id(node_id: str, *, label: str | None = None, grouped: bool = False) -> str:
    """How the record of a test is called: by its node id, as it is without ``--dist=loadgroup``.

    The label follows the name of the function: ``test_x.py::test_it@gw0[8]``.
    """
    if grouped:
        node_id = _ungrouped(node_id)
    if label is None:
        return node_id
    bracket = node_id.find("[", node_id.find("::"))
    end = len(node_id) if bracket < 0 else bracket
    return f"{node_id[:end]}@{label}{node_id[end:]}"


def _ungrouped(node_id: str) -> str:
    """Without the ``@group`` that xdist adds: after the parameters, or the name where there are none."""
    begin = node_id.rfind("]") if "[" in node_id[node_id.find("::") :] else node_id.rfind("::")
    at = node_id.find("@", begin)
    return node_id if at < 0 else node_id[:at]


# pytest-xdist: how many workers help.

#: How xdist is told the number for ``-n auto``.
SAID = "PYTEST_XDIST_AUTO_NUM_WORKERS"

#: Options with which pytest only shows something. xdist asks for a number there too.
LOOKING = (
    "collectonly",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "help",
    "version",
    "setupplan",
    "cacheshow",
)


def useful_workers(config: pytest.Config) -> int | None:
    """How many workers leases can keep busy, for ``-n auto``: one for each GPU, and one where there is none.

    A test on the CPU has the host to itself. Where the GPUs cannot be told there is one, with a warning.
    ``None`` leaves it to others: in a run that keeps no report or runs no test, and where
    ``PYTEST_XDIST_AUTO_NUM_WORKERS`` says it. Raises ``pytest.UsageError`` like ``read_settings``.
    """
    settings = read_settings(config)
    looks = any(config.getoption(name, default=False) for name in LOOKING)
    if not settings.keeps_something or looks or os.environ.get(SAID):
        return None
    from pytest_llenergy.devices.subprocess_query import query_gpu_count
    from pytest_llenergy.errors import DeviceError, LLEnergyWarning

    try:
        return max(1, query_gpu_count(settings.gpus))
    except DeviceError as error:
        config.issue_config_time_warning(LLEnergyWarning(f"-n auto starts one worker: {error}"), stacklevel=2)
        return 1


# What the controller of pytest-xdist knows of its workers: whose a test is, where they run, what is left.
#
# A plugin object of the controller. Without xdist none of its hooks is ever called.

#: What a baseline is called and what it holds, for workers that may not have the file.
BaselineFile = tuple[str, bytes]


class Fleet:
    """``baseline`` gives the one to compare with, for a worker that may not have the file."""

    def __init__(self, config: pytest.Config, baseline: Callable[[], BaselineFile | None]) -> None:
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
