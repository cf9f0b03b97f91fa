# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a run that measures nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "numpy", "transformers", "pynvml", "psutil", "msgspec", "rich", "cloudpickle", "filelock"]

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


@pytest.mark.parametrize("args", [[], ["--co"], ["--fixtures"], ["--markers"], ["--help"]], ids=str)
def test_nothing_is_imported_made_or_started(pytester: pytest.Pytester, args: list[str]) -> None:
    pytester.makeconftest(SPY)
    pytester.makepyfile("def test_it(): pass")
    folder = pytester.mkdir("suite")
    for file in ("conftest.py", *(path.name for path in pytester.path.glob("test_*.py"))):
        (pytester.path / file).rename(folder / file)
    before = {path.name for path in folder.iterdir()}
    # Other plugins that may be installed beside this one start what they like.
    blocked = [part for name in ("xdist", "anyio", "benchmark", "timeout") for part in ("-p", f"no:{name}")]
    result = pytester.runpytest_subprocess(str(folder), *args, *blocked, "-p", "no:cacheprovider")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["HEAVY [[]] STARTED [[]]"])
    after = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert after == before


def test_blocking_the_plugin_leaves_no_trace(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import sys\ndef pytest_unconfigure(config):\n"
        "    print('OURS', [name for name in sys.modules if name.startswith('pytest_llenergy')])\n"
    )
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("-p", "no:llenergy")
    result.stdout.fnmatch_lines(["OURS [[]]"])


def test_the_rank_entry_imports_nothing_but_the_standard_library() -> None:
    from pytest_llenergy.workers import rank

    source = Path(rank.__file__).read_text()
    names = {
        line.split()[1].partition(".")[0]
        for line in source.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert names <= sys.stdlib_module_names
