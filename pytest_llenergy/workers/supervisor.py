# SPDX-License-Identifier: Apache-2.0
"""The process between pytest and its ranks. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pytest_llenergy.workers import guard, proctree, rank, transport

# Importing what forked ranks share, strictly: nothing may fail, start threads or wake the GPU driver.

#: What ``cuDeviceGetCount`` says before ``cuInit`` (CUresult, cuda.h).
CUDA_ERROR_NOT_INITIALIZED = 3

REMEDY = "use --energy-start-method=spawn"


class PreloadError(Exception):
    """Forked ranks cannot be had. ``details`` is the traceback, if there is one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def preload(names: Sequence[str], sys_path: Sequence[str]) -> None:
    """Import these. Raises ``PreloadError``; the standard library's fork server would pass over it."""
    sys.path[:] = sys_path
    for name in names:
        try:
            import_module(name)
        except BaseException as error:
            said = f"importing {name} before the ranks are forked failed: {type(error).__name__}: {error}"
            raise PreloadError(said, traceback.format_exc()) from error
    if driver_is_awake():
        raise PreloadError(
            f"importing {', '.join(names)} initialised CUDA, which a forked rank cannot use; {REMEDY}"
        )
    # Pages that no collection writes to stay shared by all forks.
    gc.collect()
    gc.freeze()


def check_threads() -> None:
    """Right after a fork, when libraries that know of forks have ended their threads, as CPython looks too.

    Raises ``PreloadError`` when others are left: a fork loses them, and what they held stays locked.
    """
    threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1
    if threads > 1:
        raise PreloadError(f"the preloaded modules have left {threads - 1} threads running; {REMEDY}")


def driver_is_awake() -> bool:
    """Whether somebody has called ``cuInit`` in this process. Does not load the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


# The process between pytest and its ranks. Standard library only and one thread, but for what it preloads.
#
# It starts the ranks, adopts whatever they leave behind, and holds copies of the descriptors of their lease.
# When pytest ends, by whatever means, it ends every descendant, and then frees the devices. With modules to
# preload it imports these first, and its ranks are forks of itself; without, each is a fresh interpreter.
# Its guard (see ``guard``) ends it while it imports, and what is left when it is itself killed.

#: How often a family that is being ended is looked at (seconds), and how long the answer waits for it:
#: a process that is stuck in a driver ends when the driver lets it.
LOOK_S, PATIENCE_S = 0.002, 10.0

#: How often those that were stuck are looked at again (seconds).
SECOND_LOOK_S = 0.2


@dataclass
class Group:
    """Ranks that end together, and the descriptors that keep their devices meanwhile."""

    living: set[int] = field(default_factory=set)
    lease: list[int] = field(default_factory=list)
    ending: bool = False

    def free(self) -> None:
        """Give back the devices."""
        for descriptor in self.lease:
            os.close(descriptor)
        self.lease.clear()


class Supervisor:
    """Serves one client until that is gone.

    That is, of its socket or of ``client_pid``. ``listens`` is where its guard is told that it listens.
    """

    def __init__(self, client: socket.socket, client_pid: int, directory: str, listens: int) -> None:
        self._client = client
        self._client_pid = client_pid
        self._listens = listens
        self._guard_pid = os.getppid()
        self._pid = os.getpid()
        self._groups: dict[str, Group] = {}
        self._codes: dict[int, int] = {}
        self._ended_by: int | None = None
        self._woken, self._wake = socket.socketpair()
        self._preloaded = False
        self._directory = directory
        self._flags: list[str] = []
        self._client_pidfd: int | None = None

    def run(self) -> None:
        """Preload, then serve. What is left in the end is ended."""
        proctree.become_subreaper()
        boot, _ = transport.receive_message(self._client)
        try:
            # A fork of pytest may keep its end of the socket open; this one tells of pytest itself.
            with suppress(OSError, AttributeError):
                self._client_pidfd = os.pidfd_open(self._client_pid)
            self._flags = boot["flags"]
            if boot["preload"]:
                self._preloaded = True
                # Nobody listens meanwhile, which may be for ever: any signal ends it, and its guard the rest.
                preload(boot["preload"], boot["sys_path"])
            self._listen()
            transport.send_message(self._client, {"ok": self._pid})
            self._serve()
        except PreloadError as error:
            transport.send_message(self._client, {"error": str(error), "details": error.details})
        finally:
            self._finish()

    def _listen(self) -> None:
        for each in (self._woken, self._wake):
            each.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in guard.ENDING_SIGNALS:
            signal.signal(number, self._on_end)
        # Each of the two ends what the other leaves behind when it is killed.
        proctree.die_with_parent(self._guard_pid, signal.SIGTERM)
        os.write(self._listens, b"1")
        os.close(self._listens)

    def _on_end(self, number: int, _frame: object) -> None:
        self._ended_by = number

    def _serve(self) -> None:
        verbs: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "code": self._code,
            "signal": self._signal,
            "end": self._end,
        }
        heard = select.poll()
        for source in (self._client, self._woken, self._client_pidfd):
            if source is not None:
                heard.register(source, select.POLLIN)
        while self._ended_by is None:
            stuck = any(group.ending for group in self._groups.values())
            ready = {source for source, _ in heard.poll(SECOND_LOOK_S * 1e3 if stuck else None)}
            if self._client_pidfd in ready:
                return
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            self._reap()
            self._end_strays()
            for name in [name for name, group in self._groups.items() if group.ending]:
                self._forget_if_gone(name)
            if self._client.fileno() in ready:
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
        """One rank. ``descriptors``: its socket, its log, its directory, and those of the lease."""
        connection, log, directory, *lease = descriptors
        family_of = self._groups.setdefault(group, Group())
        pid = os.fork()
        if pid == 0:
            self._become_rank(connection, log, directory, lease, environment, python)
        for each in (connection, log, directory, *(lease if family_of.lease else ())):
            os.close(each)
        family_of.lease = family_of.lease or lease
        family_of.living.add(pid)
        if self._preloaded:
            check_threads()
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
        """In the new process: nothing of the supervisor is left but what the rank is given."""
        try:
            proctree.die_with_parent(self._pid)
            # While it lives, what its own children leave behind is its own.
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
                # Another interpreter may not know the flags of pytest's.
                interpreter = [python] if python else [sys.executable, *self._flags]
                os.execve(interpreter[0], [*interpreter, rank.__file__, str(connection)], environment)
            for each in (nothing, log, directory, *self._own_descriptors()):
                os.close(each)
            os.environ.clear()
            os.environ.update(environment)
            rank.main(connection, preloaded=True)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _own_descriptors(self) -> list[int]:
        sockets = [each.detach() for each in (self._client, self._woken, self._wake)]
        pidfd = [self._client_pidfd] if self._client_pidfd is not None else []
        return sockets + pidfd + [each for group in self._groups.values() for each in group.lease]

    def _code(self, pid: int, descriptors: list[int]) -> int | None:
        """The exit code of a rank, negative for a signal; ``None`` while it runs."""
        return self._codes.get(pid)

    def _signal(self, group: str, number: int, descriptors: list[int]) -> None:
        """Send a signal to the ranks of a group that still run."""
        for pid in self._groups[group].living if group in self._groups else ():
            os.kill(pid, number)

    def _end(self, group: str, descriptors: list[int]) -> list[int]:
        """End a group and all that came of it. Returns what is stuck and keeps its devices until it ends."""
        found = self._groups.get(group)
        if found is None:
            return []
        found.ending = True
        deadline = time.monotonic() + PATIENCE_S
        while not self._forget_if_gone(group) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return sorted(found.living)

    def _forget_if_gone(self, name: str) -> bool:
        """Kill what is left of a group; once nothing is, its devices are free."""
        group = self._groups[name]
        proctree.kill_tree(group.living)
        self._reap()
        self._end_strays()
        if group.living or self._strays():
            return False
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
                    self._codes[pid] = os.waitstatus_to_exitcode(status)

    def _strays(self) -> set[int]:
        """What ranks have left behind. While a rank lives it is itself the parent of its orphans."""
        known = {pid for group in self._groups.values() for pid in group.living}
        return set(proctree.children_by_parent().get(self._pid, ())) - known

    def _end_strays(self) -> None:
        proctree.kill_tree(self._strays())

    def _finish(self) -> None:
        pause_s = LOOK_S
        # A module that was imported may have started something, too.
        while self._groups or self._strays():
            self._end_strays()
            self._reap()
            for name in list(self._groups):
                self._forget_if_gone(name)
            time.sleep(pause_s)
            # What is stuck may be so for hours.
            pause_s = min(2 * pause_s, SECOND_LOOK_S)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._ended_by is not None:
            # So that it is seen by whom.
            signal.signal(self._ended_by, signal.SIG_DFL)
            os.kill(self._pid, self._ended_by)


def main(descriptor: int, client_pid: int, directory: str) -> None:
    """Serve the client at the other end of this socket, with a guard around."""
    listens = guard.fork_under_guard(client_pid, directory, descriptor)
    # A module may end its whole process group.
    os.setsid()
    os.set_inheritable(descriptor, False)
    Supervisor(socket.socket(fileno=descriptor), client_pid, directory, listens).run()
    # Modules that were preloaded have nothing to say at the end.
    os._exit(0)
