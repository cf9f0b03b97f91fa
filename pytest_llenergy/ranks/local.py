# SPDX-License-Identifier: Apache-2.0
"""Ranks on pytest's own host, started by a supervisor process between pytest and them."""

from __future__ import annotations

import _socket
import operator
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llenergy import real_time
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import proctree, timeouts, transport
from pytest_llenergy.ranks.guard import PACKAGE_PARENT
from pytest_llenergy.ranks.host import Host, StartedRank, StartMethod
from pytest_llenergy.ranks.plan import PER_RANK_VARIABLES, ProcessPlan
from pytest_llenergy.scratch import ScratchDirectory

#: How much of a rank's output an error shows; enough for the stacks of its threads.
TAIL_LINES, TAIL_BYTES = 120, 16384

#: Not run with ``-m``, which would put another directory first on the search path.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.ranks.supervisor import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
"""


def read_tail(log: Path) -> list[str]:
    """Return the last lines of a log; none if it is gone together with its supervisor."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return []


def interpreter_command() -> list[str]:
    """Return the command of a fresh interpreter with the flags of this one."""
    # Private and therefore untyped; multiprocessing passes the same to its own spawned processes.
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


class _Supervisor:
    """A running supervisor and its guard, as pytest controls them; one request at a time.

    Raises ``WorkerError`` if it cannot import a module to preload, or does not answer.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        # One thread may kill ranks while another one waits for them.
        self._lock = threading.Lock()
        #: Whether an answer is missing, which would be mistaken for that to the next request.
        self._broken = False
        self._scratch = ScratchDirectory()
        self.directory: Path = self._scratch.path
        self._log = self.directory / "supervisor.log"
        self._connection, theirs = transport.connection_pair()
        lock = self._scratch.descriptor
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(lock)]
        try:
            with theirs, self._log.open("wb") as log:
                # In a session of its own: Ctrl-C at the terminal must reach only pytest, which then stops its
                # ranks.
                self._popen = subprocess.Popen(
                    [*interpreter_command(), "-c", PROGRAM, PACKAGE_PARENT, *arguments],
                    pass_fds=[theirs.fileno(), lock],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, transport.SUPERVISOR_VARIABLE: str(self.directory)},
                    start_new_session=True,
                )
        except BaseException:
            # Also on Ctrl-C: nothing else removes the directory.
            self._connection.close()
            self._scratch.remove()
            raise
        #: The pid of the guard until the supervisor has answered.
        self._pid = self._popen.pid
        boot = {"preload": list(preload), "sys_path": list(map(str, sys.path))}
        try:
            self._pid = self._request(boot, (), timeout_s)
        except BaseException:
            # Also on Ctrl-C: otherwise the supervisor would continue to import, without a client.
            self._broken = True
            self.close()
            raise

    def request(self, verb: str, descriptors: Sequence[int] = (), **arguments: Any) -> Any:
        """Return the answer to a request; raises ``WorkerError`` if the supervisor refuses or is gone."""
        with self._lock:
            return self._request((verb, arguments), descriptors, timeouts.SUPERVISOR_ANSWER_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        """Whether the supervisor can be used."""
        return not self._broken and self._popen.poll() is None

    def close(self) -> None:
        """Let the supervisor kill its ranks and end; if it does not, kill it and the ranks."""
        self._connection.close()
        try:
            self._popen.wait(0.0 if self._broken else timeouts.SUPERVISOR_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            proctree.kill_tree({self._popen.pid})
            self._popen.wait()
        self._scratch.remove()

    def _request(self, message: Any, descriptors: Sequence[int], timeout_s: float) -> Any:
        named = f"the supervisor of the ranks (pid {self._pid})"
        try:
            transport.send_with_files(self._connection, message, descriptors)
            if not transport.wait([self._connection], timeout_s):
                raise WorkerError(f"{named} did not answer within {timeout_s:.3g} s")
            state, answer = self._connection.recv()
        except BaseException as error:
            self._broken = True
            # A TimeoutError is of an alarm that the test has set.
            if isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError):
                why = "".join(f": {line}" for line in read_tail(self._log)[-1:])
                raise WorkerError(f"{named} has ended{why}; its ranks ended with it") from None
            raise
        if state == "error":
            raise WorkerError(*answer)
        return answer


class _Group(NamedTuple):
    """A prepared group: its supervisor, whether its ranks are forks of that, and its directory."""

    supervisor: _Supervisor
    forks: bool
    directory: Path


class LocalHost(Host):
    """The ``Host`` that pytest itself runs on; see there.

    Ranks that are forks share the modules, environment and search path of their supervisor. So a group that
    needs others gets a new one, which serves all groups from then on.
    """

    def __init__(self, start_method: StartMethod) -> None:
        self._start_method = start_method
        self._supervisor: _Supervisor | None = None
        #: What forks of the supervisor share.
        self._shared: object = None
        self._groups: dict[str, _Group] = {}

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """See ``Host``."""
        forks = bool(preload) and self._start_method == "forkserver"
        # Libraries read environment variables on import.
        variables = {name: value for name, value in environment.items() if name not in PER_RANK_VARIABLES}
        shared = (list(preload), variables, list(sys.path)) if forks else self._shared
        if self._supervisor is None or not self._supervisor.alive or shared != self._shared:
            previous, self._supervisor = self._supervisor, None
            self._close_unused(previous)
            self._supervisor = _Supervisor(preload if forks else (), variables, timeout_s)
            self._shared = shared if forks else None
        where = self._supervisor.directory / group
        where.mkdir()
        self._groups[group] = _Group(self._supervisor, forks, where)

    def meet(
        self, group: str, plan: ProcessPlan, hosts: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, dict[str, dict[str, str]]]:
        """See ``Host``."""
        url, master = self.meet_here(group, len(plan.ranks))
        return url, dict.fromkeys(hosts, master)

    def meet_here(self, group: str, ranks: int) -> tuple[str, dict[str, str]]:
        """Return the ``init_method`` for a number of ranks here, and variables for them."""
        # Libraries of one rank that join a group of one listen at any port: it needs no socket.
        port = 0
        if ranks > 1:
            # The class that no test replaces: a test may forbid sockets in its process.
            with closing(_socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        # A file: no name to resolve, no port that others could take.
        url = f"file://{self._find(group).directory}/rendezvous"
        return url, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

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
        supervisor, forks, where = self._find(group)
        # Another interpreter may not accept the flags of pytest's.
        command = None if forks else [python] if python else interpreter_command()
        marked = {**environment, transport.SUPERVISOR_VARIABLE: str(supervisor.directory)}
        ours, theirs = transport.connection_pair()
        here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        try:
            with theirs, (where / f"rank{rank}.log").open("ab") as log:
                passed = [theirs.fileno(), log.fileno(), here, *descriptors]
                pid = supervisor.request("start", passed, group=group, environment=marked, command=command)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(here)
        # If the rank is gone, the next request reports it.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send({**boot, "directory": str(where)})
        return StartedRank(pid, forks, ours, partial(read_tail, where / f"rank{rank}.log"))

    def exit_code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        limit_s = timeouts.EXIT_CODE_TIMEOUT_S
        code: int | None = self._find(group).supervisor.request("exit_code", pid=pid, limit_s=limit_s)
        return code

    def write_stacks(self, group: str) -> None:
        """See ``Host``. Waits until all logs have grown, and then rest."""
        supervisor, _, directory = self._find(group)
        logs = list(directory.glob("rank*.log"))
        starts = sizes = [log.stat().st_size for log in logs]
        # faulthandler acts on it, also while one thread holds the interpreter's lock (see ``rank``).
        supervisor.request("signal", group=group, number=int(signal.SIGUSR2))
        for _ in range(int(timeouts.STACKS_TIMEOUT_S / timeouts.STACKS_POLL_S)):
            real_time.sleep(timeouts.STACKS_POLL_S)
            before, sizes = sizes, [log.stat().st_size for log in logs]
            if sizes == before and all(map(operator.gt, sizes, starts)):
                return

    def kill(self, group: str) -> None:
        """See ``Host``."""
        if group not in self._groups:
            return
        supervisor, _, directory = self._groups.pop(group)
        if supervisor.alive:
            with suppress(WorkerError):
                supervisor.request("kill", group=group)
        shutil.rmtree(directory, ignore_errors=True)
        self._close_unused(supervisor)

    def close(self) -> None:
        """Kill all groups and free all resources."""
        left = [self._supervisor, *(each.supervisor for each in self._groups.values())]
        self._supervisor = self._shared = None
        self._groups.clear()
        for each in left:
            self._close_unused(each)

    def _close_unused(self, supervisor: _Supervisor | None) -> None:
        """Close a supervisor that serves no group and will serve none, or cannot."""
        used = [self._supervisor, *(each.supervisor for each in self._groups.values())]
        if supervisor is not None and not (supervisor in used and supervisor.alive):
            supervisor.close()

    def _find(self, group: str) -> _Group:
        try:
            return self._groups[group]
        except KeyError:
            raise WorkerError("these ranks have been ended") from None
