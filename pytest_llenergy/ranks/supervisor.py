# SPDX-License-Identifier: Apache-2.0
"""The process between pytest and its ranks. Standard library only and one thread, but for what it preloads.

It starts the ranks, adopts whatever they leave behind, and holds copies of the open files of their device
lease. When pytest ends, in whatever way, it kills every descendant and only then frees the devices. Its guard
(see ``guard``) does so if it is itself killed, or hangs in an import.

A rank is a fresh interpreter, or a fork of this process, which has then imported what ranks share. The
standard library's fork server ignores failed imports; here they are errors.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.ranks import guard, proctree, rank, timeouts, transport


class PreloadError(Exception):
    """Ranks cannot be forked from this process. Arguments: the message, and a traceback if there is one."""


@dataclass
class Group:
    """Ranks that are killed together: pids of running ones, and the descriptors of their device lease."""

    living: set[int] = field(default_factory=set)
    lease: list[int] = field(default_factory=list)


class Supervisor:
    """Serves one client until its connection closes or the process ``client_pid`` ends.

    A fork of pytest may keep the other end of the connection open. The ``directory`` is removed at the end;
    ranks do not get the descriptor that locks it.
    """

    def __init__(self, client: Connection, client_pid: int, directory: str, lock: int) -> None:
        self._client = client
        self._guard_pid = os.getppid()
        self._pid = os.getpid()
        self._groups: dict[str, Group] = {}
        self._exit_codes: dict[int, int] = {}
        self._directory = directory
        self._lock = lock
        self._watched = [client.fileno()]
        # Not every kernel has them.
        with suppress(OSError, AttributeError):
            self._watched.append(os.pidfd_open(client_pid))

    def run(self) -> NoReturn:
        """Preload modules, serve the client, and kill all descendants in the end."""
        status = 0
        proctree.become_subreaper()
        try:
            boot, _ = transport.receive_with_files(self._client)
            if boot["preload"]:
                # Meanwhile, perhaps for ever, any signal ends this process, and its guard kills the rest.
                preload(boot["preload"], boot["sys_path"])
            self._signals = guard.Signals()
            # Supervisor and guard each clean up after the other if that is killed.
            die_with_parent(self._guard_pid, signal.SIGTERM)
            self._client.send(("ok", self._pid))
            status = self._serve()
        except PreloadError as error:
            self._client.send(("error", error.args))
        except (EOFError, ConnectionError):
            # pytest is gone.
            pass
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            status = 1
        # Leases end with this process. A preloaded module may have started processes, too.
        proctree.kill_children()
        shutil.rmtree(self._directory, ignore_errors=True)
        # Skips the exit handlers of preloaded modules.
        os._exit(status)

    def _serve(self) -> int:
        """Answer each request; its verbs are methods. Returns the exit code of this process."""
        while True:
            readable, ending = self._signals.wait(self._watched)
            if ending is not None:
                return 128 + ending
            if readable & set(self._watched[1:]):
                return 0
            self._reap()
            proctree.kill_tree(self._strays())
            if self._client.fileno() in readable:
                (verb, arguments), descriptors = transport.receive_with_files(self._client)
                try:
                    given = (descriptors,) if descriptors else ()
                    answer = "ok", getattr(self, f"_{verb}")(*given, **arguments)
                except OSError as error:
                    answer = "error", (f"{type(error).__name__}: {error}",)
                self._client.send(answer)

    def _start(
        self, descriptors: list[int], group: str, environment: dict[str, str], command: list[str] | None
    ) -> int:
        """Start a rank, as a fork of this process if there is no ``command`` of an interpreter.

        ``descriptors`` are its socket, log and working directory, and those of the lease.
        """
        members, lease = self._groups.setdefault(group, Group()), descriptors[3:]
        pid = os.fork()
        if pid == 0:
            self._become_rank(descriptors, environment, command)
        for each in (*descriptors[:3], *(lease if members.lease else ())):
            os.close(each)
        members.lease = members.lease or lease
        members.living.add(pid)
        return pid

    def _become_rank(
        self, descriptors: list[int], environment: dict[str, str], command: list[str] | None
    ) -> NoReturn:
        """In a new process: drop everything of the supervisor, then run the rank's program."""
        try:
            die_with_parent(self._pid)
            # A living rank adopts what its own children leave behind.
            proctree.become_subreaper()
            os.setsid()
            connection, log, directory, *lease = descriptors
            os.fchdir(directory)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            own = [*self._signals.close(), *self._watched, self._lock]
            if command is not None:
                for each in (connection, *lease):
                    os.set_inheritable(each, True)
                os.execve(command[0], [*command, rank.__file__, str(connection)], environment)
            leases = [each for group in self._groups.values() for each in group.lease]
            for each in (nothing, log, directory, *own, *leases):
                os.close(each)
            os.environ.clear()
            os.environ.update(environment)
            rank.main(connection, preloaded=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _exit_code(self, pid: int, limit_s: float) -> int | None:
        """Wait for the exit code of a rank, whose connection closes before its process ends."""
        deadline = time.monotonic() + limit_s
        while pid not in self._exit_codes and time.monotonic() < deadline:
            time.sleep(timeouts.KILL_POLL_S)
            self._reap()
        return self._exit_codes.get(pid)

    def _signal(self, group: str, number: int) -> None:
        proctree.send_signal(self._groups.get(group, Group()).living, number)

    def _kill(self, group: str) -> None:
        """Kill a group, then free its devices. What is stuck in the kernel holds them itself."""
        members = self._groups.get(group, Group())
        deadline = time.monotonic() + timeouts.GROUP_KILL_TIMEOUT_S
        while (members.living or self._strays()) and time.monotonic() < deadline:
            proctree.kill_tree(members.living | self._strays())
            self._reap()
            time.sleep(timeouts.KILL_POLL_S)
        # What was just killed may still be a zombie with a pid.
        self._reap()
        for each in members.lease:
            os.close(each)
        self._groups.pop(group, None)

    def _reap(self) -> None:
        for pid, code in proctree.reap():
            self._exit_codes[pid] = code
            for group in self._groups.values():
                group.living.discard(pid)

    def _strays(self) -> set[int]:
        """Return processes that ended ranks have left behind. A living rank is the parent of its orphans."""
        return proctree.children().difference(*(group.living for group in self._groups.values()))


def preload(names: Sequence[str], sys_path: Sequence[str]) -> None:
    """Import modules for all later forks, or raise ``PreloadError``."""
    sys.path[:] = sys_path
    for name in names:
        try:
            import_module(name)
        except BaseException as error:
            message = f"importing {name} before the ranks are forked failed: {type(error).__name__}: {error}"
            raise PreloadError(message, traceback.format_exc()) from error
    # Memory pages that no garbage collection writes to stay shared by all forks.
    gc.collect()
    gc.freeze()


def main(descriptor: int, client_pid: int, directory: str, lock: int) -> None:
    """Serve the client at the other end of a socket, under a guard; see ``Supervisor``."""
    guard.fork_under_guard(client_pid, directory, descriptor)
    # A preloaded module may kill its whole process group, and must not hit the guard.
    os.setsid()
    for each in (descriptor, lock):
        os.set_inheritable(each, False)
    Supervisor(Connection(descriptor), client_pid, directory, lock).run()
