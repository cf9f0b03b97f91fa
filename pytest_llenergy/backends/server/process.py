# SPDX-License-Identifier: Apache-2.0
"""The server process: started as a child, or found by its port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.backends.secrets import hide_keys, remember_keys
from pytest_llenergy.backends.server import is_url
from pytest_llenergy.backends.server.settings import Address, parse_local_url
from pytest_llenergy.backends.timeouts import (
    EXIT_WAIT_S,
    KILLED_TIMEOUT_S,
    LEFT_BEHIND_TIMEOUT_S,
    TERMINATE_TIMEOUT_S,
)
from pytest_llenergy.errors import BackendError, ServerError

if TYPE_CHECKING:
    import psutil


#: How much of a server's output is shown (bytes, lines).
TAIL_BYTES, TAIL_LINES = 8192, 20

#: Programs that start a server and are not part of it.
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "fish", "tmux: server", "screen", "sshd", "systemd"})

#: Programs that listen on behalf of a server in a container.
PROXIES = frozenset({"docker-proxy", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "conmon"})

#: Device files that a process using a GPU holds open: of CUDA and of ROCm.
GPU_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


class ServerProcess:
    """A server started with this process's environment, and so on its devices. Its output goes to a file.

    Raises ``BackendError`` if the program does not exist.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        self._name = words[0]
        remember_keys(words)
        try:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._output.close()
            raise BackendError(f"server: {words[0]} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Pid of the command; the server may be a child of it."""
        return self._child.pid

    def pids(self) -> set[int]:
        """Return the pids of the command and its descendants."""
        return {each.pid for each in _family(self.pid)}

    def check_alive(self, when: str = "") -> None:
        """Raise ``ServerError`` with its last output line if it has died; without ``when`` it may be dying.

        Its output is copied to that of this rank, which failure messages include.
        """
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(0.0 if when else EXIT_WAIT_S)
        status = self._child.returncode
        if status is None:
            return
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        tail = self._read_tail()
        sys.stdout.writelines(f"{self._name}: {line}\n" for line in tail)
        sys.stdout.flush()
        last = tail[-1].strip() if tail else "no output"
        raise ServerError(f"server: {self._name} ended with {how}{when}: {last}")

    def _read_tail(self) -> list[str]:
        """Return the last lines of its output."""
        size = os.fstat(self._output.fileno()).st_size
        # pread, since reading would move the file position at which the child writes.
        written = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        lines = hide_keys(written.decode(errors="replace")).splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    def stop(self) -> None:
        """Terminate the server, then kill whatever remains of it and its descendants."""
        import psutil

        alive = _family(self.pid)
        # The command first: it may end its own processes in order.
        with suppress(ProcessLookupError):
            self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(TERMINATE_TIMEOUT_S)
        _, alive = psutil.wait_procs(alive, 0)
        for end, limit_s in (("terminate", LEFT_BEHIND_TIMEOUT_S), ("kill", KILLED_TIMEOUT_S)):
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, end)()
            _, alive = psutil.wait_procs(alive, limit_s if alive else 0)
        self._child.wait()
        self._output.close()


@dataclass(frozen=True)
class ProcessFamily:
    """A server's processes: ``root`` and its descendants. If unknown, ``root`` is None for a ``reason``."""

    root: int | None
    reason: str | None = None

    def pids(self) -> set[int]:
        """Return the pids that are alive now."""
        return set() if self.root is None else {each.pid for each in _family(self.root)}

    def uses_gpu(self) -> bool:
        """Whether one of them has a GPU open, as far as this user can see."""
        return any(_uses_gpu(pid) for pid in self.pids())


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants that are alive."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def find_listeners(address: Address) -> set[int]:
    """Return the visible pids that listen at an address."""
    import psutil

    with suppress(psutil.AccessDenied):
        return {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.pid and tuple(each.laddr)[1:] == (address.port,)
        }
    return set()


def check_listener(address: Address, server: ServerProcess) -> None:
    """Raise ``BackendError`` if another process than the one that was started answers at an address."""
    pids = find_listeners(address)
    if not pids & server.pids():
        who = f"process {min(pids)}" if pids else "a process that is not visible here"
        raise BackendError(
            f"server: port {address.port} is answered by {who}, which the command did not start (a "
            "container, a daemon?); start it yourself and give its URL"
        )


def find_running(target: str) -> ProcessFamily | None:
    """Find the processes of a value of ``--energy-server``; None for a command, which has none yet."""
    return find_family(parse_local_url(target)) if is_url(target) else None


def find_running_pids(targets: Iterable[str]) -> frozenset[int]:
    """Find the first process of each running server, which may use the devices of the tests."""
    families = map(find_running, targets)
    return frozenset(each.root for each in families if each is not None and each.root is not None)


def find_family(address: Address) -> ProcessFamily:
    """Find the processes of the server that listens at an address."""
    import psutil

    pids = sorted(find_listeners(address))
    if not pids:
        return ProcessFamily(
            None, f"the listener on port {address.port} is not visible, such as another user's process"
        )
    try:
        process = psutil.Process(pids[0])
        if process.name() in PROXIES:
            return ProcessFamily(None, f"port {address.port} belongs to a container ({process.name()})")
        return ProcessFamily(_find_root(process).pid)
    except psutil.Error as error:
        return ProcessFamily(None, f"process {pids[0]} on port {address.port} cannot be inspected ({error})")


def _find_root(process: psutil.Process) -> psutil.Process:
    """Return the topmost ancestor of the listener in its process group that is part of the server."""
    import psutil

    ours = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    group = os.getpgid(process.pid)
    while (parent := process.parent()) is not None:
        is_outside = parent.pid in ours or parent.pid == 1 or parent.name() in SHELLS
        if is_outside or os.getpgid(parent.pid) != group:
            return process
        process = parent
    return process


def _uses_gpu(pid: int) -> bool:
    with suppress(OSError):
        files = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        return any(file.startswith(GPU_FILES) for file in files)
    return False
