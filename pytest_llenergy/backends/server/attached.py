# SPDX-License-Identifier: Apache-2.0
"""The processes of a server that was not started here, found from the port that it listens on."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.backends.server.settings import Address

if TYPE_CHECKING:
    import psutil

#: What starts a server and is none of it.
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "fish", "tmux: server", "screen", "sshd", "systemd"})

#: What listens for a server that is in a container.
PROXIES = frozenset({"docker-proxy", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "conmon"})

#: How often it is looked whether a server has gone (seconds).
LOOK_S = 0.05

#: What a process that uses a GPU holds open: CUDA's own file, and that of ROCm.
GPU_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


@dataclass(frozen=True)
class Family:
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


def listeners(address: Address) -> set[int]:
    """The pids of those that listen there and can be seen."""
    import psutil

    found: set[int] = set()
    with suppress(psutil.AccessDenied):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.pid and tuple(each.laddr)[1:] == (address.port,):
                found.add(each.pid)
    return found


def is_deserted(address: Address, within_s: float) -> bool:
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
        time.sleep(LOOK_S)


def family_at(address: Address) -> Family:
    """The processes of the server that listens there."""
    import psutil

    found = sorted(listeners(address))
    if not found:
        return Family(None, f"who listens on port {address.port} is not told, as of another user's process")
    try:
        process = psutil.Process(found[0])
        if process.name() in PROXIES:
            return Family(None, f"port {address.port} is that of a container ({process.name()})")
        return Family(_root(process).pid)
    except psutil.Error as error:
        return Family(None, f"process {found[0]} on port {address.port} cannot be looked at ({error})")


def _root(process: psutil.Process) -> psutil.Process:
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
