# SPDX-License-Identifier: Apache-2.0
"""A run that measures nothing imports nothing heavy, starts no process and writes no file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HEAVY = [
    "torch",
    "numpy",
    "transformers",
    "pynvml",
    "psutil",
    "msgspec",
    "rich",
    "cloudpickle",
    "filelock",
    "matplotlib",
]

#: Other plugins, which may start and import what they like.
BLOCKED = [part for name in ("xdist", "anyio", "benchmark", "timeout") for part in ("-p", f"no:{name}")]

SPY = f"""
import subprocess, sys

started = []
class Spy(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        started.append(args)
        super().__init__(*args, **kwargs)
subprocess.Popen = Spy

def pytest_unconfigure(config):
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    print("HEAVY", loaded, "STARTED", started)
"""

#: Records processes, connections and files written, from before the plugin is imported.
WATCH = """
import os, re, sys

EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "pty.spawn",
          "socket.connect", "socket.bind", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink"}
did = []

def watch(event, args):
    if event in EVENTS or event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        # Random parts of names differ from run to run.
        did.append((event, re.sub("/[a-z0-9_]{8}$", "/*", str(args[0]))))

sys.addaudithook(watch)

def pytest_unconfigure(config):
    found = sorted(did)
    print("DID", len(found), found)
"""


@pytest.mark.parametrize("args", [[], ["--co"]], ids=str)
def test_idle_run_starts_and_writes_nothing_more_than_without_the_plugin(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    pytester.makepyfile(
        watch=WATCH, test_it="import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n): pass"
    )
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def did(*more: str) -> list[str]:
        result = pytester.runpytest_subprocess(
            *args, "-p", "watch", "-p", "no:cacheprovider", *BLOCKED, *more
        )
        assert result.ret == 0
        return [line for line in result.outlines if line.startswith("DID ")]

    idle = did()
    # pytest itself opens files for captured output.
    assert len(idle) == 1
    assert not idle[0].startswith("DID 0")
    assert idle == did("-p", "no:llenergy")


@pytest.mark.parametrize("args", [[], ["--co"], ["--fixtures"], ["--markers"], ["--help"]], ids=str)
def test_idle_run_imports_nothing_heavy(pytester: pytest.Pytester, args: list[str]) -> None:
    pytester.makeconftest(SPY)
    pytester.makepyfile("def test_it(): pass")
    folder = pytester.mkdir("suite")
    for file in ("conftest.py", *(path.name for path in pytester.path.glob("test_*.py"))):
        (pytester.path / file).rename(folder / file)
    before = {path.name for path in folder.iterdir()}
    result = pytester.runpytest_subprocess(str(folder), *args, *BLOCKED, "-p", "no:cacheprovider")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["HEAVY [[]] STARTED [[]]"])
    after = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert after == before


def test_blocked_plugin_is_not_imported(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import sys\ndef pytest_unconfigure(config):\n"
        "    print('OURS', [name for name in sys.modules if name.startswith('pytest_llenergy')])\n"
    )
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "no:llenergy")
    result.stdout.fnmatch_lines(["OURS [[]]"])


def test_rank_entry_imports_only_the_standard_library() -> None:
    from pytest_llenergy.ranks import rank

    source = Path(rank.__file__).read_text()
    names = {
        line.split()[1].partition(".")[0]
        for line in source.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert names <= sys.stdlib_module_names
