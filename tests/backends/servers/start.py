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
from urllib.error import URLError
from urllib.request import urlopen

from pytest_llenergy.backends.server.settings import find_free_port

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
