# SPDX-License-Identifier: Apache-2.0
"""Tests on a server, from test file to record: options, processes, and what is left afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.ranks.usage import BackendProcesses, cpu_time_used_s

from ..ranks.survivors import await_none, marked, survivors
from .servers.start import orphan, scripted

pytest.importorskip("aiohttp")

Read = Callable[..., dict[str, Any]]

SERVES = """
def test_it(energy, backend):
    run = energy(backend.serve, ["abc", "hello"], request_rate=20.0, num_requests=12, max_new_tokens=4)
    assert run.result.output_tokens == 48
"""
QUICK = ["--energy-report", "--energy-backend=server"]


def test_without_configuration_the_server_is_left_out_unless_named(quick: pytest.Pytester) -> None:
    quick.makepyfile("def test_it(energy, backend): pass\n")
    quick.runpytest("--energy-model=random:llama-tiny", "-rs").stdout.no_fnmatch_line("*energy-server-*")
    result = quick.runpytest("--energy-backend=server")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    actual = " ".join(result.stderr.str().split())
    assert "server is not available: give --energy-server='llama-server -m {model}" in actual
    assert "or --energy-server=http://127.0.0.1:8000 to use one that runs on this host" in actual


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_server_is_left_when_pytest_is_killed(quick: pytest.Pytester, number: signal.Signals) -> None:
    """The server has its own session and a child; neither outlives the run."""
    quick.makepyfile(
        """
        import pathlib
        def test_it(energy, backend):
            backend.generate(["abc"], max_new_tokens=1)
            pathlib.Path("loaded").touch()
            backend.generate(["abc"], max_new_tokens=2)
        """
    )
    script = "import os, subprocess, sys; os.setsid(); subprocess.run(sys.argv[1:])"
    command = scripted(step=300).split(" ", 1)
    whole = f"{command[0]} -c '{script}' {' '.join(command)}"
    with marked() as mark:
        args = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--energy-backend=server"]
        with subprocess.Popen(
            [*args, f"--energy-server={whole}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as pytest_:
            while not Path("loaded").exists():
                assert pytest_.poll() is None
                time.sleep(0.05)
            assert sum("scripted.py" in line for line in survivors(mark).values()) >= 2
            pytest_.send_signal(number)
        assert await_none(mark) == {}


class TestCpuTime:
    BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass\n"

    def test_cpu_time_of_an_attached_server_counts(self) -> None:
        with orphan([sys.executable, "-c", self.BUSY]) as pid:
            worker = BackendWorker(pid=pid, rank=0, world_size=1, attached=True)
            use = BackendProcesses([worker])
            assert use.servers == (pid,)
            before, theirs_s = use.cpu_times_s(), psutil.Process(pid).cpu_times().user
            while psutil.Process(pid).cpu_times().user < theirs_s + 0.3:
                time.sleep(0.05)
            assert cpu_time_used_s(before, use.cpu_times_s()) >= 0.29


def test_a_history_that_the_server_cuts_is_refused(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        """
        from pytest_llenergy.backends.traffic import Request
        def test_it(energy, backend):
            said = [("user", "w " * 3900), ("assistant", "yes")]
            prompt = Request(history=said, prompt="go on")
            energy(backend.serve, [prompt], endpoint="chat", concurrency=1, num_requests=2, max_new_tokens=8)
        """
    )
    server = Path(__file__).parents[1] / "contract" / "server.py"
    result = quick.runpytest(*QUICK, f"--energy-server={sys.executable} {server} {{port}} cuts=64")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*server: it counts 64 tokens in a prompt of *, so it cuts long prompts; *"])
