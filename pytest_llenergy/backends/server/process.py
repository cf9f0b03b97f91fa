# SPDX-License-Identifier: Apache-2.0
"""The server process: started as a child, or found by its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.backends.server.settings import Address
from pytest_llenergy.errors import BackendError

if TYPE_CHECKING:
    import psutil


# A server as a child of this process, with what it writes.

#: How long a server may take to end when it is told to, and then what it has left behind (seconds).
TERMINATE_TIMEOUT_S, KILL_TIMEOUT_S = 3.0, 0.5

#: How much of its output is shown, in bytes and lines.
TAIL_BYTES, TAIL_LINES = 8192, 20


class ServerProcess:
    """Started with the environment of this process, and so with its devices. Its output goes to a file."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises ``BackendError`` when there is no such program."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        self._name = words[0]
        try:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._output.close()
            raise BackendError(f"server: {words[0]} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Of the command itself; the server may be a child of it."""
        return self._child.pid

    def pids(self) -> set[int]:
        """The command and all that it has started."""
        return {each.pid for each in self._family()}

    def died(self, within_s: float = 0.0) -> str | None:
        """How it ended and its last line; ``None`` while it runs, and has not ended ``within_s`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(within_s)
        status = self._child.returncode
        if status is None:
            return None
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self._name} ended with {how}: {self._last_line()}"

    def tail(self) -> list[str]:
        """The last lines of its output."""
        size = os.fstat(self._output.fileno()).st_size
        # Not read: the child writes where a read would leave the file's position.
        written = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        lines = written.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    def show(self) -> None:
        """Put the tail into the output of this rank, which failures are told with."""
        for line in self.tail():
            sys.stdout.write(f"{self._name}: {line}\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Tell it to end, then make sure of it and of all that it has started."""
        import psutil

        family = self._family()
        with suppress(ProcessLookupError):
            self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(TERMINATE_TIMEOUT_S)
        _, alive = psutil.wait_procs(family, 0)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(alive, KILL_TIMEOUT_S if alive else 0)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        psutil.wait_procs(alive, KILL_TIMEOUT_S)
        self._output.close()

    def _family(self) -> list[psutil.Process]:
        import psutil

        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _last_line(self) -> str:
        return (self.tail() or ["it has written nothing"])[-1].strip()


# The processes of a server that was not started here, found from the port that it listens on.

#: What starts a server and is none of it.
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "fish", "tmux: server", "screen", "sshd", "systemd"})

#: What listens for a server that is in a container.
PROXIES = frozenset({"docker-proxy", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "conmon"})

#: How often it is looked whether a server has gone (seconds).
PORT_POLL_S = 0.05

#: What a process that uses a GPU holds open: CUDA's own file, and that of ROCm.
GPU_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


@dataclass(frozen=True)
class ProcessFamily:
    """A server's processes: ``root`` and what comes of it; ``None`` with the ``reason`` if it is not told."""

    root: int | None
    reason: str | None = None

    def pids(self) -> set[int]:
        """Those that live now."""
        import psutil

        if self.root is None:
            return set()
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.root)
            return {self.root, *(each.pid for each in process.children(recursive=True))}
        return set()

    def uses_gpu(self) -> bool:
        """Whether one of them has opened a GPU, as far as that can be seen."""
        return any(_uses_gpu(pid) for pid in self.pids())


def find_listeners(address: Address) -> set[int]:
    """The pids of those that listen there and can be seen."""
    import psutil

    found: set[int] = set()
    with suppress(psutil.AccessDenied):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.pid and tuple(each.laddr)[1:] == (address.port,):
                found.add(each.pid)
    return found


def is_port_closed(address: Address, within_s: float) -> bool:
    """Whether nobody listens there, now or after at most ``within_s``: who is killed takes a while to go.

    It is tried, as who listens is not told of another user's process or of a container.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=within_s).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(PORT_POLL_S)


def find_family(address: Address) -> ProcessFamily:
    """The processes of the server that listens there."""
    import psutil

    found = sorted(find_listeners(address))
    if not found:
        return ProcessFamily(
            None, f"who listens on port {address.port} is not told, as of another user's process"
        )
    try:
        process = psutil.Process(found[0])
        if process.name() in PROXIES:
            return ProcessFamily(None, f"port {address.port} is that of a container ({process.name()})")
        return ProcessFamily(_find_root(process).pid)
    except psutil.Error as error:
        return ProcessFamily(None, f"process {found[0]} on port {address.port} cannot be looked at ({error})")


def _find_root(process: psutil.Process) -> psutil.Process:
    """Whoever started the listener as a part of the server: its ancestors in the same process group."""
    import psutil

    ours = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    group = os.getpgid(process.pid)
    while (parent := process.parent()) is not None:
        if parent.pid in ours or parent.pid == 1 or parent.name() in SHELLS:
            return process
        if os.getpgid(parent.pid) != group:
            return process
        process = parent
    return process


def _uses_gpu(pid: int) -> bool:
    with suppress(OSError):
        files = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        return any(file.startswith(GPU_FILES) for file in files)
    return False
