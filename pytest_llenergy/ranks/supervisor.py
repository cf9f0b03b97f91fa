# SPDX-License-Identifier: Apache-2.0
"""The process between pytest and its ranks. Standard library only and one thread, but for what it preloads.

It starts the ranks, adopts whatever they leave behind, and holds copies of the open files of their device
lease. When pytest ends, in whatever way, it kills every descendant and only then frees the devices. With
modules to preload it imports these first, and its ranks are forks of itself; otherwise each rank is a fresh
interpreter. Its guard (see ``guard``) ends it while it imports, and kills what is left when it is itself
killed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.ranks import guard, proctree, rank, start_method, timeouts, transport
from pytest_llenergy.ranks.start_method import PreloadError


@dataclass
class Group:
    """Ranks that are killed together: pids of running ones, and the descriptors of their device lease."""

    living: set[int] = field(default_factory=set)
    lease: list[int] = field(default_factory=list)
    ending: bool = False

    def free(self) -> None:
        """Close the descriptors of the lease."""
        for descriptor in self.lease:
            os.close(descriptor)
        self.lease.clear()


class Supervisor:
    """Serves one client until its socket closes or the process ``client_pid`` ends.

    Args:
        client: The socket to pytest.
        client_pid: pytest's process. A fork of pytest may keep the other end of the socket open.
        directory: Removed at the end.
        lock: The descriptor that locks the directory; ranks do not get it.
    """

    def __init__(self, client: socket.socket, client_pid: int, directory: str, lock: int) -> None:
        self._client = client
        self._client_pid = client_pid
        self._guard_pid = os.getppid()
        self._pid = os.getpid()
        self._groups: dict[str, Group] = {}
        self._exit_codes: dict[int, int] = {}
        self._ended_by: int | None = None
        self._signal_socket, self._wake = socket.socketpair()
        self._preloaded = False
        self._directory = directory
        self._lock = lock
        self._flags: list[str] = []
        self._client_pidfd: int | None = None

    def run(self) -> None:
        """Preload modules, serve the client, and kill all descendants in the end."""
        proctree.become_subreaper()
        boot, _ = transport.receive_message(self._client)
        try:
            with suppress(OSError, AttributeError):
                self._client_pidfd = os.pidfd_open(self._client_pid)
            self._flags = boot["flags"]
            if boot["preload"]:
                self._preloaded = True
                # Nothing is served meanwhile, perhaps for ever: any signal ends this process, and its guard
                # kills the rest.
                start_method.preload(boot["preload"], boot["sys_path"])
            self._handle_signals()
            transport.send_message(self._client, {"ok": self._pid})
            self._serve()
        except PreloadError as error:
            transport.send_message(self._client, {"error": str(error), "details": error.details})
        finally:
            self._finish()

    def _handle_signals(self) -> None:
        for each in (self._signal_socket, self._wake):
            each.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in guard.ENDING_SIGNALS:
            signal.signal(number, self._on_ending_signal)
        # Supervisor and guard each clean up after the other if that is killed.
        die_with_parent(self._guard_pid, signal.SIGTERM)

    def _on_ending_signal(self, number: int, _frame: object) -> None:
        self._ended_by = number

    def _serve(self) -> None:
        verbs: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "exit_code": self._exit_code,
            "signal": self._send_signal,
            "kill": self._kill,
        }
        poll = select.poll()
        for source in (self._client, self._signal_socket, self._client_pidfd):
            if source is not None:
                poll.register(source, select.POLLIN)
        while self._ended_by is None:
            readable = {source for source, _ in poll.poll()}
            if self._client_pidfd in readable:
                return
            if self._signal_socket.fileno() in readable:
                self._signal_socket.recv(4096)
            self._reap()
            self._kill_strays()
            for name in [name for name, group in self._groups.items() if group.ending]:
                self._kill_group(name)
            if self._client.fileno() in readable:
                try:
                    request, descriptors = transport.receive_message(self._client)
                except (EOFError, OSError):
                    return
                try:
                    answer = {"ok": verbs[request.pop("verb")](descriptors=descriptors, **request)}
                except (OSError, PreloadError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                try:
                    transport.send_message(self._client, answer)
                except OSError:
                    return

    def _start(
        self, group: str, environment: dict[str, str], descriptors: list[int], python: str | None = None
    ) -> int:
        """Start a rank. ``descriptors`` are its socket, log and working directory, and those of the lease."""
        connection, log, directory, *lease = descriptors
        members = self._groups.setdefault(group, Group())
        pid = os.fork()
        if pid == 0:
            self._become_rank(connection, log, directory, lease, environment, python)
        for each in (connection, log, directory, *(lease if members.lease else ())):
            os.close(each)
        members.lease = members.lease or lease
        members.living.add(pid)
        if self._preloaded:
            start_method.check_threads()
        return pid

    def _become_rank(
        self,
        connection: int,
        log: int,
        directory: int,
        lease: list[int],
        environment: dict[str, str],
        python: str | None,
    ) -> NoReturn:
        """In a new process: drop everything of the supervisor, then run the rank's program."""
        try:
            die_with_parent(self._pid)
            # A living rank adopts what its own children leave behind.
            proctree.become_subreaper()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *guard.ENDING_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            os.fchdir(directory)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            if not self._preloaded:
                for each in (connection, *lease):
                    os.set_inheritable(each, True)
                # Another interpreter may not accept the flags of pytest's.
                interpreter = [python] if python else [sys.executable, *self._flags]
                os.execve(interpreter[0], [*interpreter, rank.__file__, str(connection)], environment)
            for each in (nothing, log, directory, *self._detach_descriptors()):
                os.close(each)
            os.environ.clear()
            os.environ.update(environment)
            rank.main(connection, preloaded=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _detach_descriptors(self) -> list[int]:
        sockets = [each.detach() for each in (self._client, self._signal_socket, self._wake)]
        pidfd = [self._client_pidfd] if self._client_pidfd is not None else []
        return [*sockets, *pidfd, self._lock] + [
            each for group in self._groups.values() for each in group.lease
        ]

    def _exit_code(self, pid: int, descriptors: list[int]) -> int | None:
        return self._exit_codes.get(pid)

    def _send_signal(self, group: str, number: int, descriptors: list[int]) -> None:
        for pid in self._groups[group].living if group in self._groups else ():
            os.kill(pid, number)

    def _kill(self, group: str, descriptors: list[int]) -> list[int]:
        """Kill a group. Returns ranks that are stuck in the kernel; these keep their devices."""
        members = self._groups.get(group)
        if members is None:
            return []
        members.ending = True
        deadline = time.monotonic() + timeouts.GROUP_KILL_TIMEOUT_S
        while not self._kill_group(group) and time.monotonic() < deadline:
            time.sleep(timeouts.KILL_POLL_S)
        return sorted(members.living)

    def _kill_group(self, name: str) -> bool:
        """Kill what is left of a group. Returns whether nothing is; its devices are then free."""
        group = self._groups[name]
        proctree.kill_tree(group.living)
        self._reap()
        self._kill_strays()
        if group.living or self._strays():
            return False
        # A stray that was just killed is still a zombie with a pid.
        self._reap()
        group.free()
        del self._groups[name]
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for group in self._groups.values():
                if pid in group.living:
                    group.living.discard(pid)
                    self._exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def _strays(self) -> set[int]:
        """Return processes that ended ranks have left behind. A living rank is the parent of its orphans."""
        living = {pid for group in self._groups.values() for pid in group.living}
        return set(proctree.children_by_parent().get(self._pid, ())) - living

    def _kill_strays(self) -> None:
        proctree.kill_tree(self._strays())

    def _finish(self) -> None:
        pause_s = timeouts.KILL_POLL_S
        # A preloaded module may have started processes, too.
        while self._groups or self._strays():
            self._kill_strays()
            self._reap()
            for name in list(self._groups):
                self._kill_group(name)
            time.sleep(pause_s)
            # A process that is stuck in a driver may be so for hours.
            pause_s = min(2 * pause_s, timeouts.STUCK_POLL_S)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._ended_by is not None:
            # End by the same signal, so that pytest can report which it was.
            signal.signal(self._ended_by, signal.SIG_DFL)
            os.kill(self._pid, self._ended_by)


def main(descriptor: int, client_pid: int, directory: str, lock: int) -> None:
    """Serve the client at the other end of a socket, under a guard.

    Args:
        descriptor: The socket of the client.
        client_pid: The client's process id.
        directory: Directory to remove at the end.
        lock: Descriptor that locks the directory.
    """
    guard.fork_under_guard(client_pid, directory, descriptor)
    # A preloaded module may kill its whole process group, and must not hit the guard.
    os.setsid()
    for each in (descriptor, lock):
        os.set_inheritable(each, False)
    Supervisor(socket.socket(fileno=descriptor), client_pid, directory, lock).run()
    # Skips the exit handlers of preloaded modules.
    os._exit(0)
