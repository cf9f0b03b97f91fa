# SPDX-License-Identifier: Apache-2.0
"""Ranks on pytest's own host, started by a supervisor process between pytest and them."""

from __future__ import annotations

import _socket
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pytest_llenergy import real_time
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import proctree, timeouts, transport
from pytest_llenergy.ranks.failure import signal_name
from pytest_llenergy.ranks.guard import PACKAGE_PARENT
from pytest_llenergy.ranks.host import StartedRank, StartMethod
from pytest_llenergy.ranks.plan import PER_RANK_VARIABLES, ProcessPlan
from pytest_llenergy.scratch import ScratchDirectory

#: What the forks of one supervisor share: modules, environment and search path. ``None`` without forks.
ForkKey = tuple[tuple[str, ...], dict[str, str], tuple[str, ...]] | None

#: How many supervisors stay: each has imported torch, and tests with one rank and with several, whose
#: numbers of threads differ, alternate.
MAX_SUPERVISORS = 3

#: How much of a rank's output an error shows; enough for the stacks of its threads.
TAIL_LINES, TAIL_BYTES = 120, 16384

#: Not run with ``-m``, which would put another directory first on the search path.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.ranks.supervisor import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
"""


class LogFile:
    """The log of a rank on this host; a ``RankLog``. A log that is ``kept`` is not truncated."""

    def __init__(self, path: Path, *, kept: bool) -> None:
        self.path: Path = path
        self._kept = kept
        #: Where the output of the current request begins (bytes).
        self._start = 0

    def mark(self) -> None:
        """See ``RankLog``."""
        self._start = self.size()
        if self._start and not self._kept:
            # Otherwise the output of all tests that share these ranks would accumulate.
            with suppress(FileNotFoundError):
                os.truncate(self.path, 0)
            self._start = 0

    def tail(self) -> list[str]:
        """See ``RankLog``."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(max(self._start, self.size() - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:]
        return []

    def size(self) -> int:
        """Return the size in bytes; 0 if the file is gone together with the supervisor."""
        with suppress(OSError):
            return self.path.stat().st_size
        return 0


def end_leftovers(directory: Path) -> None:
    """End the processes that have lost the supervisor with this directory, and its guard."""
    proctree.kill_tree(proctree.find_by_variable(transport.SUPERVISOR_VARIABLE, str(directory)))


class SupervisorClient:
    """A running supervisor and its guard, as pytest controls them; one request at a time.

    Raises ``WorkerError`` if it cannot be started, or cannot import a module to preload.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        # One thread may kill ranks while another one waits for them.
        self._lock = threading.Lock()
        self.preloads: bool = bool(preload)
        self._silent = self._broken = False
        self._scratch = ScratchDirectory(on_stale=end_leftovers)
        self.directory: Path = self._scratch.path
        self._log = self.directory / "supervisor.log"
        self._connection, theirs = transport.connection_pair()
        # Private and therefore untyped; multiprocessing passes the same to its own spawned processes.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        lock = self._scratch.descriptor
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self.directory), str(lock)]
        try:
            with theirs, self._log.open("wb") as log:
                # In a separate session: Ctrl-C at the terminal must reach only pytest, which then stops its
                # ranks.
                self._popen = subprocess.Popen(
                    [sys.executable, *flags, "-c", PROGRAM, PACKAGE_PARENT, *arguments],
                    pass_fds=[theirs.fileno(), lock],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, transport.SUPERVISOR_VARIABLE: str(self.directory)},
                    start_new_session=True,
                )
        except BaseException as error:
            # Also on Ctrl-C: nothing else removes the directory.
            self._connection.close()
            self._scratch.remove()
            if isinstance(error, OSError):
                raise WorkerError(f"the supervisor of the ranks cannot be started: {error}") from error
            raise
        try:
            #: The pid of the guard until the supervisor has answered.
            self.pid: int = self._popen.pid
            sys_path = [path for path in sys.path if isinstance(path, str)]
            boot = {"preload": list(preload), "sys_path": sys_path, "flags": flags}
            self.pid = int(self._request(boot, (), timeout_s))
        except BaseException as error:
            # Also on Ctrl-C: otherwise the supervisor would continue to import, without a client.
            silent = self._silent
            self._silent = silent or not isinstance(error, WorkerError)
            self.close()
            if isinstance(error, WorkerError) and silent and preload:
                error.args = (f"{error.args[0]}: it imports {', '.join(preload)}",)
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
            # Do not wait for a supervisor that is still importing, or that has failed to answer before.
            self._popen.wait(0.0 if self._silent else timeouts.SUPERVISOR_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            proctree.kill_tree({self._popen.pid})
            self._popen.wait()
        if self._popen.returncode != 0:
            end_leftovers(self.directory)
        self._scratch.remove()

    def _request(self, message: Any, descriptors: Sequence[int], timeout_s: float) -> Any:
        try:
            transport.send_with_files(self._connection, message, descriptors)
            if not transport.wait([self._connection], timeout_s):
                self._silent = True
                why = f"did not answer within {timeout_s:.3g} s"
                raise WorkerError(f"the supervisor of the ranks (pid {self.pid}) {why}")
            state, answer = self._connection.recv()
        except BaseException as error:
            # After Ctrl-C, for example, the late answer would be mistaken for that to the next request.
            self._broken = True
            if isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError):
                raise WorkerError(self._explain_end()) from None
            raise
        if state == "error":
            raise WorkerError(*answer)
        return answer

    def _explain_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeouts.GUARD_EXIT_TIMEOUT_S)
        last = [f": {line}" for line in LogFile(self._log, kept=True).tail()[-1:]]
        code = self._popen.returncode
        how = "has ended" if code is None else f"ended with exit code {code}"
        if code is not None and (code < 0 or code > 128):
            # The guard tells by its exit code what has ended the supervisor.
            how = f"was ended by {signal_name(-code if code < 0 else code - 128)}"
        return f"the supervisor of the ranks (pid {self.pid}) {how}{''.join(last)}; its ranks ended with it"


class LocalHost:
    """The ``Host`` that pytest itself runs on; see there.

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
        self._logs_of: dict[str, list[LogFile]] = {}

    @property
    def lost(self) -> None:
        """pytest's own host is never lost to it."""
        return None

    def to_local(self, time_ns: int) -> int:
        """All processes of a host have one monotonic clock."""
        return time_ns

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """Start or choose the supervisor for a group.

        Libraries read environment variables on import, so a fork needs a supervisor with the same variables.
        """
        names = tuple(preload) if self._start_method == "forkserver" else ()
        shared = {name: value for name, value in environment.items() if name not in PER_RANK_VARIABLES}
        key: ForkKey = (names, shared, tuple(sys.path)) if names else None
        self._close([each for each in self._supervisors if not each[1].alive])
        matches = [each for each in self._supervisors if each[0] == key]
        if not matches:
            idle = [each for each in self._supervisors if each[1] not in self._supervisor_of.values()]
            self._close(idle[: max(0, len(self._supervisors) + 1 - MAX_SUPERVISORS)])
            matches = [(key, SupervisorClient(names, shared, timeout_s))]
        self._supervisors = [*(each for each in self._supervisors if each not in matches), *matches]
        self._supervisor_of[group] = matches[0][1]

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
        url = f"file://{self.directory(group)}/rendezvous"
        return url, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def directory(self, group: str) -> Path:
        """Return a private directory for a group, which its supervisor removes if pytest cannot."""
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
        supervisor, directory = self._supervisor_of[group], self.directory(group)
        logs = self._logs_of.setdefault(group, [])
        where = logs[0].path.parent if logs else directory
        if self._logs is not None and not logs:
            # In a container each run of pytest may have the same pid.
            where = self._logs / f"{time.strftime('%Y%m%dT%H%M%S')}-{group}"
        where.mkdir(parents=True, exist_ok=True)
        log = LogFile(where / f"rank{rank}.log", kept=self._logs is not None)
        ours, theirs = transport.connection_pair()
        # Opened for appending, so that it can be truncated while the rank writes.
        with theirs, log.path.open("ab") as file:
            here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            try:
                passed = [theirs.fileno(), file.fileno(), here, *descriptors]
                marked = {**environment, transport.SUPERVISOR_VARIABLE: str(supervisor.directory)}
                pid = int(supervisor.request("start", passed, group=group, environment=marked, python=python))
            except BaseException:
                ours.close()
                raise
            finally:
                os.close(here)
        logs.append(log)
        # If the rank is gone, the next request reports it.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send({**boot, "directory": str(directory)})
        return StartedRank(pid, supervisor.preloads, ours, log)

    def exit_code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        limit_s = timeouts.EXIT_CODE_TIMEOUT_S
        code: int | None = self._supervisor_of[group].request("exit_code", pid=pid, limit_s=limit_s)
        return code

    def write_stacks(self, group: str) -> None:
        """See ``Host``. Waits until all have written something and their logs rest."""
        logs = self._logs_of.get(group, [])
        starts = sizes = [log.size() for log in logs]
        with suppress(WorkerError):
            # faulthandler acts on it, also while one thread holds the interpreter's lock (see ``rank``).
            self._supervisor_of[group].request("signal", group=group, number=int(signal.SIGUSR2))
        for _ in range(int(timeouts.STACKS_TIMEOUT_S / timeouts.STACKS_POLL_S)):
            real_time.sleep(timeouts.STACKS_POLL_S)
            before, sizes = sizes, [log.size() for log in logs]
            if sizes == before and all(size > start for size, start in zip(sizes, starts, strict=True)):
                return

    def kill(self, group: str) -> list[int]:
        """See ``Host``."""
        self._logs_of.pop(group, None)
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
        del self._supervisor_of[group]
        return stuck

    def close(self) -> None:
        """See ``Host``."""
        self._close(self._supervisors)

    def _close(self, supervisors: Sequence[tuple[ForkKey, SupervisorClient]]) -> None:
        for each in list(supervisors):
            self._supervisors.remove(each)
            each[1].close()
