# SPDX-License-Identifier: Apache-2.0
"""Ranks on pytest's own host, started by a supervisor process between pytest and them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import guard, meeting, proctree, rank_log, timeouts, transport
from pytest_llenergy.ranks.failure import signal_name
from pytest_llenergy.ranks.host import StartedRank
from pytest_llenergy.ranks.plan import PER_RANK_VARIABLES
from pytest_llenergy.ranks.rank_log import LogFile, LoggedRank
from pytest_llenergy.ranks.start_method import StartMethod
from pytest_llenergy.ranks.transport import Channel
from pytest_llenergy.scratch import ScratchDirectory

#: What the forks of one supervisor share: modules, environment and search path. ``None`` without forks.
ForkKey = tuple[tuple[str, ...], dict[str, str], tuple[str, ...]] | None

#: How many supervisors stay: each has imported torch, and tests with one rank and with several, whose
#: numbers of threads differ, alternate.
MAX_SUPERVISORS = 3

#: Not run with ``-m``, which would put another directory first on the search path.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.ranks.supervisor import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
"""


def end_leftovers(directory: Path) -> None:
    """End the processes that have lost the supervisor with this directory, and its guard."""
    proctree.kill_tree(proctree.find_by_variable(transport.SUPERVISOR_VARIABLE, str(directory)))


class SupervisorClient:
    """A running supervisor and its guard, as pytest controls them; one request at a time.

    Args:
        preload: Modules that the supervisor imports.
        environment: All environment variables of the supervisor.
        timeout_s: Time limit for its first answer (seconds).

    Raises:
        WorkerError: The supervisor cannot be started, or cannot import a module.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        # One thread may kill ranks while another one waits for them.
        self._lock = threading.Lock()
        self.preloads: bool = bool(preload)
        self._booted = self._broken = self._silent = False
        #: pidfds of the guard and the supervisor.
        self.sentinels: list[int] = []
        self._scratch = ScratchDirectory(on_stale=end_leftovers)
        self.directory: Path = self._scratch.path
        self._log = self.directory / "supervisor.log"
        self._socket, theirs = transport.socket_pair()
        # Private and therefore untyped; multiprocessing passes the same to its own spawned processes.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        lock = self._scratch.descriptor
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(lock)]
        try:
            with theirs, self._log.open("wb") as log:
                # In a separate session: Ctrl-C at the terminal must reach only pytest, which then stops its
                # ranks.
                self._popen = subprocess.Popen(
                    [sys.executable, *flags, "-c", PROGRAM, guard.PACKAGE_PARENT, *arguments],
                    pass_fds=[theirs.fileno(), lock],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, transport.SUPERVISOR_VARIABLE: str(self.directory)},
                    start_new_session=True,
                )
        except BaseException as error:
            # Also on Ctrl-C: nothing else removes the directory.
            self._socket.close()
            self._scratch.remove()
            if isinstance(error, OSError):
                raise WorkerError(f"the supervisor of the ranks cannot be started: {error}") from error
            raise
        try:
            boot = {
                "preload": list(preload),
                "sys_path": [path for path in sys.path if isinstance(path, str)],
                "flags": flags,
            }
            # The pid of the guard until the supervisor has answered.
            self.pid: int = self._popen.pid
            self.pid = int(self._request(timeout_s, (), boot))
            self._watch(self._popen.pid, self.pid)
        except BaseException as error:
            # Also on Ctrl-C: otherwise the supervisor would continue to import, without a client.
            self.close()
            if isinstance(error, WorkerError) and self._silent and preload:
                error.args = (f"{error.args[0]}: it imports {', '.join(preload)}",)
            raise

    def request(self, verb: str, descriptors: Sequence[int] = (), **request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            WorkerError: If the supervisor refuses or is gone.
        """
        with self._lock:
            return self._request(timeouts.SUPERVISOR_ANSWER_TIMEOUT_S, descriptors, {"verb": verb, **request})

    @property
    def alive(self) -> bool:
        """Whether the supervisor can be used."""
        return not self._broken and self._popen.poll() is None

    def close(self) -> None:
        """Let the supervisor kill its ranks and end; if it does not, kill it and the ranks."""
        self._socket.close()
        while self.sentinels:
            os.close(self.sentinels.pop())
        try:
            # Do not wait for a supervisor that is still importing, or that has failed to answer before.
            listens = self._booted and not self._silent
            self._popen.wait(timeouts.SUPERVISOR_STOP_TIMEOUT_S if listens else 0.0)
        except subprocess.TimeoutExpired:
            proctree.kill_tree({self._popen.pid})
            self._popen.kill()
            self._popen.wait()
        if self._popen.returncode != 0:
            end_leftovers(self.directory)
        self._scratch.remove()

    def _watch(self, *pids: int) -> None:
        for pid in pids:
            # Without pidfds the connections of the ranks have to do.
            with suppress(OSError, AttributeError):
                self.sentinels.append(os.pidfd_open(pid))

    def _request(self, timeout_s: float, descriptors: Sequence[int], request: dict[str, Any]) -> Any:
        self._socket.settimeout(timeout_s)
        try:
            transport.send_message(self._socket, request, descriptors)
            answer, _ = transport.receive_message(self._socket)
        except TimeoutError:
            self._broken = self._silent = True
            why = f"did not answer within {timeout_s:.3g} s"
            raise WorkerError(f"the supervisor of the ranks (pid {self.pid}) {why}") from None
        except (EOFError, OSError):
            self._broken = True
            raise WorkerError(self._explain_end()) from None
        except BaseException:
            # After Ctrl-C, for example, the late answer would be mistaken for that to the next request.
            self._broken = True
            raise
        self._booted = True
        if "error" in answer:
            raise WorkerError(answer["error"], answer.get("details", ""))
        return answer["ok"]

    def _explain_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeouts.GUARD_EXIT_TIMEOUT_S)
        output = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        last = f": {output[-1]}" if output else ""
        code = self._popen.returncode
        if code is None:
            how = "has ended"
        else:
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"the supervisor of the ranks (pid {self.pid}) {how}{last}; its ranks ended with it"


class LocalHost:
    """The ``Host`` that pytest itself runs on.

    Args:
        start_method: With ``forkserver`` a supervisor imports what ranks share, and they are forks of it.
        logs: Directory that keeps the output of the ranks; without one it is removed with the ranks.
    """

    def __init__(self, start_method: StartMethod, logs: Path | None = None) -> None:
        self._start_method = start_method
        self._logs = logs
        #: The most recently used supervisor is last.
        self._supervisors: list[tuple[ForkKey, SupervisorClient]] = []
        self._supervisor_of: dict[str, SupervisorClient] = {}
        self._logs_of: dict[str, Path] = {}
        self._ranks_of: dict[str, list[LoggedRank]] = {}
        self._meetings: dict[str, socket.socket] = {}

    @property
    def lost(self) -> None:
        """See ``Host``. pytest's own host is never lost to it."""
        return None

    def to_local(self, time_ns: int) -> int:
        """See ``Host``. All processes of a host have one monotonic clock."""
        return time_ns

    def has_file(self, path: str) -> bool:
        """See ``Host``."""
        return True

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """Start or choose the supervisor for a group.

        Libraries read environment variables on import, so a fork needs a supervisor with the same variables.
        """
        names = tuple(preload) if self._start_method == "forkserver" else ()
        shared = {name: value for name, value in environment.items() if name not in PER_RANK_VARIABLES}
        key: ForkKey = (names, shared, tuple(sys.path)) if names else None
        self._close_where(lambda _, supervisor: not supervisor.alive)
        matches = [each for each in self._supervisors if each[0] == key]
        if not matches:
            idle = [each for each in self._supervisors if each[1] not in self._supervisor_of.values()]
            spare = idle[: max(0, len(self._supervisors) + 1 - MAX_SUPERVISORS)]
            self._close_where(lambda _, supervisor: any(supervisor is each for _, each in spare))
            matches = [(key, SupervisorClient(names, shared, timeout_s))]
        self._supervisors = [*(each for each in self._supervisors if each not in matches), *matches]
        self._supervisor_of[group] = matches[0][1]

    def rendezvous_url(self, group: str) -> str:
        """Return the URL of a file: no name to resolve, no port that others could take."""
        return f"file://{self.directory(group)}/rendezvous"

    def master_address(self, group: str) -> tuple[str, int]:
        """Return an address of the loopback interface, and a free port of it."""
        return meeting.find_loopback_address()

    def offer_meeting(self, group: str) -> meeting.Offer:
        """See ``Host``. The socket is closed when the first rank of the group starts."""
        self._end_meeting(group)
        self._meetings[group], offer = meeting.listen()
        return offer

    def find_routes(self, offer: meeting.Offer) -> meeting.Routes:
        """See ``Host``."""
        return meeting.find_routes(offer)

    def directory(self, group: str) -> Path:
        """Return a private directory shared by pytest and the ranks of a group, removed with the group.

        The supervisor removes it if pytest cannot.
        """
        directory = self._supervisor_of[group].directory / group
        directory.mkdir(exist_ok=True)
        return directory

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """See ``Host``."""
        self._end_meeting(group)
        supervisor, log = self._supervisor_of[group], self._log(group, rank)
        ours, theirs = transport.socket_pair()
        # Opened for appending, so that it can be truncated while the rank writes.
        with theirs, log.path.open("ab") as file:
            directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            try:
                passed = [theirs.fileno(), file.fileno(), directory, *descriptors]
                marked = {**environment, transport.SUPERVISOR_VARIABLE: str(supervisor.directory)}
                pid = int(supervisor.request("start", passed, group=group, environment=marked, python=python))
            except BaseException:
                ours.close()
                raise
            finally:
                os.close(directory)
        self._ranks_of.setdefault(group, []).append(LoggedRank(rank, pid, log))
        channel = Channel(Connection(ours.detach()), self.directory(group))
        # If the rank is gone, the next request reports it.
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.connection.send({**boot, "directory": str(channel.directory)})
        return StartedRank(pid, supervisor.preloads, channel, log)

    def sentinels(self, group: str) -> list[int]:
        """See ``Host``."""
        return self._supervisor_of[group].sentinels

    def exit_code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        code = self._supervisor_of[group].request("exit_code", pid=pid)
        return None if code is None else int(code)

    def send_signal(self, group: str, number: int) -> None:
        """Send a signal to the running ranks of a group."""
        self._supervisor_of[group].request("signal", group=group, number=int(number))

    def write_stacks(self, group: str) -> dict[int, str]:
        """See ``Host``."""

        def ask() -> None:
            with suppress(WorkerError):
                self.send_signal(group, rank_log.STACKS_SIGNAL)

        return rank_log.write_stacks(self._ranks_of.get(group, ()), ask)

    def kill(self, group: str) -> list[int]:
        """See ``Host``."""
        self._end_meeting(group)
        self._logs_of.pop(group, None)
        self._ranks_of.pop(group, None)
        supervisor = self._supervisor_of.get(group)
        if supervisor is None:
            return []
        stuck: list[int] = []
        if supervisor.alive:
            with suppress(WorkerError):
                stuck = supervisor.request("kill", group=group)
        if not supervisor.alive:
            supervisor.close()
        shutil.rmtree(supervisor.directory / group, ignore_errors=True)
        if not stuck:
            del self._supervisor_of[group]
        return stuck

    def close(self) -> None:
        """See ``Host``."""
        self._close_where(lambda *_: True)

    def _close_where(self, condition: Callable[[ForkKey, SupervisorClient], bool]) -> None:
        for each in [each for each in self._supervisors if condition(*each)]:
            self._supervisors.remove(each)
            each[1].close()

    def _end_meeting(self, group: str) -> None:
        if (server := self._meetings.pop(group, None)) is not None:
            server.close()

    def _log(self, group: str, rank: int) -> LogFile:
        if self._logs is None:
            return LogFile(self.directory(group) / f"rank{rank}.log", kept=False)
        if group not in self._logs_of:
            # In a container each run of pytest may have the same pid.
            self._logs_of[group] = self._logs / f"{time.strftime('%Y%m%dT%H%M%S')}-{group}"
            self._logs_of[group].mkdir(parents=True, exist_ok=True)
        return LogFile(self._logs_of[group] / f"rank{rank}.log", kept=True)
