# SPDX-License-Identifier: Apache-2.0
"""Ranks on pytest's own host, by a supervisor between pytest and them."""

from __future__ import annotations

import errno
import itertools
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.workers import failure, guard, proctree, transport
from pytest_llenergy.workers.failure import signal_name
from pytest_llenergy.workers.host import StartedRank, StartMethod
from pytest_llenergy.workers.plan import PER_RANK_VARIABLES

#: What forks of one supervisor have in common: modules, environment, search path. Others have nothing.
ForkKey = tuple[tuple[str, ...], dict[str, str], tuple[str, ...]] | None

#: Tests with one rank and with several take turns, and their thread counts differ. Each has imported torch.
MAX_SUPERVISORS = 3

#: A supervisor imports what it preloads before it answers for the first time.
BOOT_TIMEOUT_S, ANSWER_TIMEOUT_S = 120.0, 30.0

#: How often to look why one does not answer, and how often in a row it is then seen stopped (seconds, times).
STOPPED_LOOK_S, STOPPED_LOOKS = 0.5, 4

#: How long one may take to end all that is left, before it is killed (seconds).
END_TIMEOUT_S = 15.0

#: How long its guard may take to end what it has left behind (seconds).
REAP_S = 5.0

#: A rank that has begun to say something says the rest (seconds).
HALF_MESSAGE_S = 10

LOOPBACK_ADDRESS = "127.0.0.1"

#: Not run as a module, which would take a search path of its own; nothing of pytest's process is in it.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.workers.supervisor import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


class SupervisorClient:
    """A running supervisor and its guard, asked one thing at a time.

    Raises ``WorkerError`` when it cannot be started, or cannot import what it is to ``preload``.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        # A thread may end ranks that another one waits for.
        self._turn = threading.Lock()
        self.preloads: bool = bool(preload)
        self._booted = self._broken = self._silent = False
        self.directory: Path = Path(tempfile.mkdtemp(prefix="llenergy-"))
        self._log = self.directory / "supervisor.log"
        self._socket, theirs = socket.socketpair()
        # Private, so without types, and what multiprocessing hands its own spawned children.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        told = [str(theirs.fileno()), str(os.getpid()), str(self.directory)]
        try:
            with theirs, self._log.open("wb") as log:
                # In a session of its own: a Ctrl-C at the terminal is for pytest, which then ends its ranks.
                self._popen = subprocess.Popen(
                    [sys.executable, *flags, "-c", PROGRAM, guard.PACKAGE_PARENT, *told],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, transport.SUPERVISOR_VARIABLE: str(self.directory)},
                    start_new_session=True,
                )
        except BaseException as error:
            # Ctrl-C too: nobody else knows of the directory.
            self._socket.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise _not_started(error, environment) from error
            raise
        try:
            boot = {
                "preload": list(preload),
                "sys_path": [path for path in sys.path if isinstance(path, str)],
                "flags": flags,
            }
            # Its guard's, until it has said its own.
            self.pid: int = self._popen.pid
            self.pid = int(self._request(BOOT_TIMEOUT_S, (), boot))
        except BaseException as error:
            # Ctrl-C too: it would go on importing with nobody to ask it for ranks.
            self.close()
            if isinstance(error, WorkerError):
                error.before_ready = True
            raise

    def request(self, verb: str, descriptors: Sequence[int] = (), **request: Any) -> Any:
        """Its answer. Raises ``WorkerError`` when it refuses or is gone."""
        with self._turn:
            return self._request(ANSWER_TIMEOUT_S, descriptors, {"verb": verb, **request})

    @property
    def alive(self) -> bool:
        """Whether it can be asked, and is ours to ask: a forked child of pytest has no ranks."""
        return os.getpid() == self._owner and not self._broken and self._popen.poll() is None

    def close(self) -> None:
        """Let it end what is left, and itself."""
        if os.getpid() != self._owner:
            return
        self._socket.close()
        try:
            # One that is still importing does not listen, nor does one that has let others wait.
            self._await_end(END_TIMEOUT_S if self._booted and not self._silent else 0.0)
        except subprocess.TimeoutExpired:
            proctree.kill_tree({self._popen.pid})
            self._popen.kill()
            self._popen.wait()
        if self._popen.returncode != 0:
            # What has lost both the supervisor and its guard.
            proctree.kill_tree(proctree.find_by_variable(transport.SUPERVISOR_VARIABLE, str(self.directory)))
        shutil.rmtree(self.directory, ignore_errors=True)

    def _request(self, timeout_s: float, descriptors: Sequence[int], request: dict[str, Any]) -> Any:
        self._socket.settimeout(timeout_s)
        try:
            transport.send_message(self._socket, request, descriptors)
            self._await_answer(timeout_s)
            answer, _ = transport.receive_message(self._socket)
        except TimeoutError:
            self._broken = self._silent = True
            why = (
                failure.PROCESS_STATES["T"]
                if failure.is_stopped(self.pid)
                else f"did not answer within {timeout_s:g} s"
            )
            raise WorkerError(f"the supervisor of the ranks (pid {self.pid}) {why}") from None
        except (EOFError, OSError):
            self._broken = True
            raise WorkerError(self._obituary()) from None
        except BaseException:
            # Such as Ctrl-C. The answer would be taken for that to the next request.
            self._broken = True
            raise
        self._booted = True
        if "error" in answer:
            raise WorkerError(answer["error"], answer.get("details", ""))
        return answer["ok"]

    def _await_end(self, timeout_s: float) -> None:
        """Raises ``TimeoutExpired``, early if it is stopped, or its guard."""
        deadline, stopped = time.monotonic() + timeout_s, 0
        while True:
            try:
                self._popen.wait(max(0.0, min(STOPPED_LOOK_S, deadline - time.monotonic())))
                return
            except subprocess.TimeoutExpired:
                stopped = stopped + 1 if any(map(failure.is_stopped, {self.pid, self._popen.pid})) else 0
                if stopped >= STOPPED_LOOKS or time.monotonic() >= deadline:
                    raise

    def _await_answer(self, timeout_s: float) -> None:
        """Until it begins to answer. Raises ``TimeoutError``, early if it is stopped."""
        deadline, stopped = time.monotonic() + timeout_s, 0
        heard = select.poll()
        heard.register(self._socket, select.POLLIN)
        while not heard.poll(STOPPED_LOOK_S * 1e3):
            stopped = stopped + 1 if failure.is_stopped(self.pid) else 0
            if stopped >= STOPPED_LOOKS or time.monotonic() > deadline:
                raise TimeoutError

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)
        said = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        last = f": {said[-1]}" if said else ""
        code = self._popen.returncode
        how = f"was ended by {signal_name(-code)}" if code and code < 0 else f"ended with exit code {code}"
        return f"the supervisor of the ranks (pid {self.pid}) {how}{last}; its ranks ended with it"


def _not_started(error: OSError, environment: Mapping[str, str]) -> WorkerError:
    """In one line, and with the variable that is to blame where the kernel does not say which."""
    said = f"the supervisor of the ranks cannot be started: {error.strerror or error}"
    if error.errno != errno.E2BIG or not environment:
        return WorkerError(said)
    sizes = {name: len(os.fsencode(value)) for name, value in environment.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    return WorkerError(
        f"{said}; the environment has {sum(sizes.values())} bytes, {sizes[largest]} of them in {largest}: "
        "unset what is not needed"
    )


class LocalHost:
    """See ``Host``. With ``forkserver`` a supervisor imports what ranks share, and they are forks of it.

    ``logs`` is where the ranks' output is kept; without, it goes with the ranks.
    """

    def __init__(self, start_method: StartMethod = "spawn", logs: Path | None = None) -> None:
        self._start_method = start_method
        self._logs = logs
        #: The last one that was used stands last.
        self._supervised: list[tuple[ForkKey, SupervisorClient]] = []
        self._of_group: dict[str, SupervisorClient] = {}
        self._logs_of_group: dict[str, Path] = {}

    def prepare(self, group: str, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Have the supervisor that ranks with this environment can come from.

        Libraries read their variables when they are imported, so a fork needs one with the same.
        """
        names = tuple(preload) if self._start_method == "forkserver" else ()
        shared = {name: value for name, value in environment.items() if name not in PER_RANK_VARIABLES}
        key: ForkKey = (names, shared, tuple(sys.path)) if names else None
        self._close_where(lambda _, supervised: not supervised.alive)
        found = [each for each in self._supervised if each[0] == key]
        if not found:
            idle = [each for each in self._supervised if each[1] not in self._of_group.values()]
            spare = idle[: max(0, len(self._supervised) + 1 - MAX_SUPERVISORS)]
            self._close_where(lambda _, supervised: any(supervised is each for _, each in spare))
            found = [(key, SupervisorClient(names, shared))]
        self._supervised = [*(each for each in self._supervised if each not in found), *found]
        self._of_group[group] = found[0][1]

    def rendezvous(self, group: str) -> str:
        """A file: nothing to look up, no port to lose to others."""
        return f"file://{self.directory(group)}/rendezvous"

    def meeting(self, group: str) -> tuple[str, int]:
        """Over the loopback interface: all ranks are here."""
        with socket.socket() as probe:
            probe.bind((LOOPBACK_ADDRESS, 0))
            return LOOPBACK_ADDRESS, int(probe.getsockname()[1])

    def directory(self, group: str) -> Path:
        """See ``Host``; the supervisor removes it when pytest cannot."""
        directory = self._of_group[group].directory / group
        directory.mkdir(exist_ok=True)
        return directory

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """See ``Host``."""
        supervised, log = self._of_group[group], self._log(group, rank)
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HALF_MESSAGE_S, 0))
        # Appended to, so that it can be cut while the rank writes.
        with theirs, log.open("ab") as file:
            here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            try:
                given = [theirs.fileno(), file.fileno(), here, *descriptors]
                marked = {**environment, transport.SUPERVISOR_VARIABLE: str(supervised.directory)}
                pid = supervised.request("start", given, group=group, environment=marked, python=python)
            except BaseException:
                ours.close()
                raise
            finally:
                os.close(here)
        return StartedRank(int(pid), supervised.preloads, Connection(ours.detach()), log)

    def code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        code = self._of_group[group].request("code", pid=pid)
        return None if code is None else int(code)

    def signal(self, group: str, number: int) -> None:
        """See ``Host``."""
        self._of_group[group].request("signal", group=group, number=int(number))

    def end(self, group: str) -> list[int]:
        """See ``Host``."""
        self._logs_of_group.pop(group, None)
        supervised = self._of_group.get(group)
        if supervised is None:
            return []
        stuck: list[int] = []
        if supervised.alive:
            with suppress(WorkerError):
                stuck = supervised.request("end", group=group)
        if not supervised.alive:
            supervised.close()
        shutil.rmtree(supervised.directory / group, ignore_errors=True)
        if not stuck:
            del self._of_group[group]
        return stuck

    def close(self) -> None:
        """See ``Host``."""
        self._close_where(lambda *_: True)

    def _close_where(self, gone: Callable[[ForkKey, SupervisorClient], bool]) -> None:
        for each in [each for each in self._supervised if gone(*each)]:
            self._supervised.remove(each)
            each[1].close()

    def _log(self, group: str, rank: int) -> Path:
        if self._logs is None:
            return self.directory(group) / f"rank{rank}.log"
        if group not in self._logs_of_group:
            self._logs_of_group[group] = _new_directory(self._logs, group)
        return self._logs_of_group[group] / f"rank{rank}.log"


def _new_directory(parent: Path, name: str) -> Path:
    """``name``, or ``name.2`` and so on: in a container every run has the pid of the last."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = parent / (name if number == 1 else f"{name}.{number}")
        with suppress(FileExistsError):
            directory.mkdir()
            break
    return directory
