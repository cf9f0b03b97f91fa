# SPDX-License-Identifier: Apache-2.0
"""Support for pytest-xdist: number of workers, data between controller and workers, record names.

Records travel on test reports. A worker also sends messages to the controller over an execnet channel, which
it finds in its ``workerinput``. A message has left the worker when the call returns, so none is lost if the
worker dies.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pytest

import pytest_llenergy
from pytest_llenergy.plugin.interruption import UNFINISHED
from pytest_llenergy.plugin.settings import read_settings, settings_of, usage_error
from pytest_llenergy.record.environment import read_boot_id

if TYPE_CHECKING:
    from pytest_llenergy.record.record import Flag

#: This plugin's key in ``workerinput``.
KEY = "llenergy"

#: Kinds of messages from a worker: why it got no GPUs, version of this package, node ids of the tests that it
#: will measure, the boards of each test that leases some, the test that begins, the environment if it differs
#: from the controller's, and a record whose report was interrupted.
FAILURE, VERSION, MEASURED_TESTS, BOARDS, BEGIN, ENVIRONMENT, RECORD = (
    "failure",
    "version",
    "measured-tests",
    "boards",
    "begin",
    "environment",
    "record",
)

#: Name of the flag of records that were measured on another host or in another Python than the controller's.
ELSEWHERE = "elsewhere"


#: Overrides the number of workers of ``-n auto``.
AUTO_WORKERS_VARIABLE = "PYTEST_XDIST_AUTO_NUM_WORKERS"

#: Options with which pytest runs no test. xdist requests a number of workers with them too.
OPTIONS_WITHOUT_TESTS = (
    "collectonly",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "help",
    "version",
    "setupplan",
    "cacheshow",
)

#: Name and content of a baseline.
BaselineFile = tuple[str, bytes]


def useful_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto`` that leases can keep busy: one per GPU, else one.

    With ``--energy-worker-gpus=N`` it is one per N GPUs.

    A test on the CPU has the host to itself. If the GPUs cannot be counted, one worker starts, with a
    warning.

    Returns:
        None, which leaves the number to xdist, for a run that neither keeps a report nor binds GPUs or runs
        no test, and if ``PYTEST_XDIST_AUTO_NUM_WORKERS`` is set.

    Raises:
        pytest.UsageError: An option has an invalid value. xdist calls this before ``pytest_configure``.
    """
    settings = read_settings(config)
    no_tests = any(config.getoption(name, default=False) for name in OPTIONS_WITHOUT_TESTS)
    uses_gpus = settings.keeps_something or settings.worker_gpus is not None
    if not uses_gpus or no_tests or os.environ.get(AUTO_WORKERS_VARIABLE):
        return None
    from pytest_llenergy.devices.allocation import count_leasable
    from pytest_llenergy.errors import DeviceError, LLEnergyWarning

    try:
        return max(1, count_leasable(settings.gpus) // (settings.worker_gpus or 1))
    except DeviceError as error:
        config.issue_config_time_warning(LLEnergyWarning(f"-n auto starts one worker: {error}"), stacklevel=2)
        return 1


@lru_cache(maxsize=1)
def whereabouts() -> tuple[str, ...]:
    """Return host, boot, Python version and environment: equal for processes that run in the same place."""
    return platform.node(), read_boot_id(), platform.python_version(), sys.prefix


@dataclass
class WorkerInput:
    """Data that the controller passes to a worker, and the channel for the worker's messages.

    Attributes:
        channel: Channel of execnet to the controller; None in a process that is not a worker.
        label: Distinguishes the worker's records from those of workers that run the same tests.
        grouped: Whether xdist adds group names to node ids.
        home: Where the controller runs, as ``whereabouts`` returns it.
        baseline: The baseline, for a worker that may not have the file.
    """

    channel: Any = None
    label: str | None = None
    grouped: bool = False
    home: tuple[str, ...] = ()
    baseline: BaselineFile | None = None
    _environment_sent: bool = field(default=False, init=False)

    def to_primitives(self) -> dict[str, object]:
        """Return the fields as values that execnet can send."""
        return {name: getattr(self, name) for name in INPUT_FIELDS}

    def send_failure(self, message: str) -> None:
        """Send why this worker cannot run tests."""
        self._send(FAILURE, message)

    def send_tests(self, node_ids: Sequence[str]) -> None:
        """Send the tests that will be measured, as far as collection knows."""
        self._send(VERSION, pytest_llenergy.__version__)
        self._send_environment()
        self._send(MEASURED_TESTS, list(node_ids))

    def send_boards(self, boards_of: Mapping[str, int]) -> None:
        """Send how many boards each test leases, by node id."""
        self._send(BOARDS, dict(boards_of))

    def send_begin(self, node_id: str, attempt: int) -> None:
        """Send the begin of a measured test."""
        self._send_environment()
        self._send(BEGIN, [node_id, attempt])

    def send_record(self, primitives: dict[str, Any]) -> None:
        """Send a record without its report."""
        self._send(RECORD, primitives)

    def _send_environment(self) -> None:
        """Send the environment once, before the first record: the worker may die in its first test."""
        if self.elsewhere is None or self._environment_sent:
            return
        import msgspec

        from pytest_llenergy.devices.environment import collect_environment

        self._environment_sent = True
        self._send(ENVIRONMENT, msgspec.json.encode(collect_environment()))

    @property
    def elsewhere(self) -> str | None:
        """Where this process runs, if that is another host or Python than the controller's; else None."""
        if not self.home or self.home == whereabouts():
            return None
        host, _, version, prefix = whereabouts()
        return f"on {host} with Python {version} in {prefix}"

    @property
    def flags(self) -> list[Flag]:
        """Flags for every record of this process."""
        if self.elsewhere is None:
            return []
        from pytest_llenergy.record.record import Flag

        detail = (
            f"measured {self.elsewhere}; the run was started on {self.home[0]} with Python {self.home[2]}"
        )
        return [Flag(name=ELSEWHERE, severity="note", detail=detail)]

    def _send(self, kind: str, content: object) -> None:
        # The controller may have ended.
        with suppress(OSError):
            if self.channel is not None:
                self.channel.send((kind, content))


INPUT_FIELDS = tuple(each.name for each in fields(WorkerInput) if each.init)
WORKER_INPUT = pytest.StashKey[WorkerInput]()


def worker_input_of(config: pytest.Config) -> WorkerInput:
    """Return the data from the controller; empty in a process that is not a worker."""
    if WORKER_INPUT not in config.stash:
        given = getattr(config, "workerinput", {}).get(KEY) or {}
        # A controller of another version may pass more fields. It refuses this worker by its version.
        accepted = {name: value for name, value in given.items() if name in INPUT_FIELDS}
        config.stash[WORKER_INPUT] = WorkerInput(**accepted)
    return config.stash[WORKER_INPUT]


def record_id(node_id: str, *, label: str | None = None, grouped: bool = False) -> str:
    """Return the id of a test's record: its node id without the group of ``--dist=loadgroup``.

    A label follows the name of the function: ``test_x.py::test_it@gw0[8]``.

    Args:
        node_id: Node id of the test.
        label: Distinguishes workers that run the same tests; None without.
        grouped: Whether xdist adds group names to node ids.
    """
    if grouped:
        node_id = _without_group(node_id)
    if label is None:
        return node_id
    bracket = node_id.find("[", node_id.find("::"))
    end = len(node_id) if bracket < 0 else bracket
    return f"{node_id[:end]}@{label}{node_id[end:]}"


def _without_group(node_id: str) -> str:
    """Remove the ``@group`` that xdist adds after the parameters, or after the name if there are none."""
    start = node_id.rfind("]") if "[" in node_id[node_id.find("::") :] else node_id.rfind("::")
    at = node_id.find("@", start)
    return node_id if at < 0 else node_id[:at]


def _arrival_key(node: Any, primitives: dict[str, Any]) -> tuple[str, str, int]:
    return node.gateway.id, primitives["id"], primitives["attempt"]


def was_interrupted(node: Any) -> bool:
    """Whether a worker ended because of a KeyboardInterrupt."""
    return getattr(node, "workeroutput", {}).get("exitstatus") == pytest.ExitCode.INTERRUPTED


class WorkerTracker:
    """Plugin object of the controller: which tests each worker runs and has not run, and where it runs.

    Args:
        config: Configuration of the controller.
        read_baseline: Returns the baseline for workers that may not have the file.
    """

    def __init__(self, config: pytest.Config, read_baseline: Callable[[], BaselineFile | None]) -> None:
        self._config = config
        self._read_baseline = read_baseline
        # By id of the worker's specification, which the replacement of a crashed worker shares.
        self._labels: dict[int, str] = {}
        self._collected: dict[str | None, Sequence[str]] = {}
        self._ended: set[tuple[str | None, str]] = set()
        self._uncollected = False
        # Records from their arrival until the controller has kept them, with their nodes. xdist's queue
        # between both is lost if the run is interrupted.
        self._arrived: dict[tuple[str, str, int], tuple[Any, dict[str, Any]]] = {}
        # Messages, stored by the thread that receives them and read after a worker died.
        self._failures: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._measured_tests: dict[str, frozenset[str]] = {}
        self._boards_of: dict[str, int] = {}
        self._attempts: dict[tuple[str, str], int] = {}
        self._environments: dict[str, bytes] = {}

    def pytest_sessionstart(self) -> None:
        option = self._config.option
        if settings_of(self._config).keeps_something and getattr(option, "maxschedchunk", 1) is None:
            # Chunks are given to a worker together: it would keep narrow tests while it waits for a wide one.
            option.maxschedchunk = 1

    @pytest.hookimpl(optionalhook=True, wrapper=True)
    def pytest_xdist_make_scheduler(self) -> Generator[None, object, object]:
        scheduler = yield
        from xdist.scheduler import LoadScheduling

        from pytest_llenergy.plugin.xdist_scheduling import LeaseScheduling

        # A scheduler of the project stays.
        if type(scheduler) is not LoadScheduling:
            return scheduler
        return LeaseScheduling(scheduler, self._count_boards, self._boards_of)

    def _count_boards(self) -> int:
        from pytest_llenergy.devices.allocation import count_leasable
        from pytest_llenergy.errors import DeviceError

        # Without a driver, tests that lease boards are skipped or use the CPU, one after the other.
        with suppress(DeviceError):
            return count_leasable(settings_of(self._config).gpus)
        return 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        gateway = node.gateway
        spec = gateway.spec
        channel = gateway.newchannel()
        channel.setcallback(partial(self._receive, node))
        if self._dist == "each" and node.workerinput["workercount"] > 1:
            self._labels.setdefault(id(spec), gateway.id)
        # A worker that starts on this host, in this directory, reads the baseline itself.
        local = spec.popen and not (spec.chdir or spec.via)
        node.workerinput[KEY] = WorkerInput(
            channel=channel,
            label=self._label(node),
            grouped=self._dist == "loadgroup",
            home=whereabouts(),
            baseline=None if local else self._read_baseline(),
        ).to_primitives()
        if hasattr(node, "putevent"):
            node.putevent = partial(self._put_event, node.putevent)

    def _put_event(self, put: Callable[[Any], None], event: tuple[str, dict[str, Any]]) -> None:
        """Note the record of a report before xdist queues it. Runs in the thread that receives reports."""
        primitives = getattr(event[1].get("rep"), "llenergy", None)
        if primitives is not None:
            self._note_arrival(event[1]["node"], primitives)
        put(event)

    def _note_arrival(self, node: Any, primitives: dict[str, Any]) -> None:
        self._arrived[_arrival_key(node, primitives)] = node, primitives

    def note_kept(self, node: Any, primitives: dict[str, Any]) -> None:
        """Note that the controller has kept a record."""
        self._arrived.pop(_arrival_key(node, primitives), None)

    def list_arrived(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the records that the controller has not kept, with their nodes."""
        return list(self._arrived.values())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if node.gateway.id in self._failures:
            raise pytest.UsageError(self._failures[node.gateway.id])
        own = pytest_llenergy.__version__
        version = self._versions.get(node.gateway.id, own)
        if version != own:
            raise usage_error(
                f"worker {node.gateway.id} has pytest-llenergy {version}, this run was started with {own}: "
                "install the same version for both"
            )
        # Under ``--dist=each`` every worker runs all tests, otherwise they share them and have no label.
        self._collected.setdefault(self._label(node), ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        node = getattr(report, "node", None)
        if node is not None and report.when not in UNFINISHED:
            self._ended.add((self._label(node), report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._uncollected = self._uncollected or report.failed

    @property
    def tests_left_out(self) -> bool:
        """Whether a test did not run to its end, as if too many workers die, or a file was not collected."""
        return self._uncollected or any(
            (label, name) not in self._ended for label, ids in self._collected.items() for name in ids
        )

    def crashed_attempt(self, node: Any, node_id: str) -> int | None:
        """Return the attempt at which a worker died in a test, or None if the test measures nothing.

        If no test was running, xdist names the next one, whose first attempt is then lost.
        """
        worker = node.gateway.id
        attempt = self._attempts.get((worker, node_id))
        return 1 if attempt is None and node_id in self._measured_tests.get(worker, ()) else attempt

    def record_id(self, node: Any, node_id: str) -> str:
        """Return the id of the record of a test that a worker has run.

        Args:
            node_id: Node id of the test.
            label: Distinguishes workers that run the same tests; None without.
            grouped: Whether xdist adds group names to node ids.
        """
        return record_id(node_id, label=self._label(node), grouped=self._dist == "loadgroup")

    def worker_environment(self, node: Any) -> bytes | None:
        """Return the encoded environment of a worker, or None if it is that of this process."""
        return None if node is None else self._environments.get(node.gateway.id)

    @property
    def _dist(self) -> str:
        return str(self._config.getoption("dist", "no"))

    def _label(self, node: Any) -> str | None:
        return self._labels.get(id(node.gateway.spec))

    def _receive(self, node: Any, message: tuple[str, Any]) -> None:
        kind, content = message
        worker = node.gateway.id
        if kind == FAILURE:
            self._failures[worker] = content
        elif kind == VERSION:
            self._versions[worker] = content
        elif kind == MEASURED_TESTS:
            self._measured_tests[worker] = frozenset(content)
        elif kind == BOARDS:
            self._boards_of.update(content)
        elif kind == BEGIN:
            node_id, attempt = content
            self._attempts[worker, node_id] = attempt
        elif kind == ENVIRONMENT:
            self._environments[worker] = content
        elif kind == RECORD:
            self._note_arrival(node, content)
