# SPDX-License-Identifier: Apache-2.0
"""Commands that start servers, and servers that ran before the test of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.server.settings import find_free_port
from pytest_llenergy.record.record import BackendInfo

HERE = Path(__file__).parent


def scripted(**settings: object) -> str:
    """The command of a server that follows a script."""
    message = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join([sys.executable, str(HERE / "scripted.py"), "{port}", *message])


def queueing(**settings: object) -> str:
    """The command of a server of known capacity."""
    message = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join([sys.executable, str(HERE / "queueing.py"), "{port}", *message])


def sharded(shards: object, **settings: object) -> str:
    """The command of a scripted server with so many processes on simulated boards."""
    message = [f"{name}={value}" for name, value in settings.items()]
    words = [sys.executable, "-m", "tests.backends.servers.sharded", "{port}", str(shards)]
    return shlex.join([*words, *message])


def llama() -> str:
    """That of llama.cpp's server."""
    program = HERE.parents[2] / "benchmarks" / "serving" / "llama_server.py"
    return shlex.join([sys.executable, str(program), "{model}", "{port}"])


#: Backends with their servers, by command: tests that give nothing else share them.
KEPT: dict[str, tuple[ServerBackend, BackendInfo]] = {}


@contextmanager
def loaded(**options: Any) -> Iterator[tuple[ServerBackend, BackendInfo]]:
    """The server backend, loaded in this process. With ``timeout_s`` its server is started for this test."""
    command = str(options.get("command"))
    if command in KEPT and len(options) == 1:
        yield KEPT[command]
        return
    backend = ServerBackend()
    info = backend.load(ModelSource("hub", "owner/name"), {"timeout_s": 60, **options}, RankContext())
    if len(options) == 1 and "orders=" not in command and "command" in options:
        KEPT[command] = backend, info
        yield backend, info
        return
    try:
        yield backend, info
    finally:
        backend.close()


def close_kept() -> None:
    """Stop the servers that tests share."""
    while KEPT:
        KEPT.popitem()[1][0].close()


@contextmanager
def running(command: str, **values: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that the plugin has not started: in a separate process group, as from another terminal."""
    port = find_free_port()
    words = [word.format(port=port, **values) for word in shlex.split(command)]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process)
            yield url, process
        finally:
            # It may have children.
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def orphan(words: Sequence[str]) -> Iterator[int]:
    """A process that does not descend from this one; gives its pid."""
    line = f"{shlex.join(words)} >/dev/null 2>&1 & echo $!"
    message = subprocess.check_output(["sh", "-c", line], text=True)
    try:
        yield int(message)
    finally:
        os.kill(int(message), 9)


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None
        try:
            with urlopen(f"{url}/health", timeout=10):
                return
        except (URLError, OSError):
            time.sleep(0.05)
