# SPDX-License-Identifier: Apache-2.0
"""Blocks of commands: bash reads them, and the tests check or run what it would have run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .pages import ROOT
from .project import QUICK

BASH = shutil.which("bash") or "bash"

#: The exit code of bash for a missing program.
NOT_FOUND = 127

#: Record the words of every command, each ended by a zero byte, after their number.
LOOK = """
PATH=/nowhere
command_not_found_handle() { printf '%s\\0' "$#" "$@" >> "$DOCS_COMMANDS"; return "${DOCS_STATUS:-0}"; }
"""

#: Programs that really run, with the interpreter of these tests; others are recorded as above.
RUN = r"""
set -e
pytest() { "$DOCS_PYTHON" -m pytest "$@"; }
llenergy() { "$DOCS_PYTHON" -m pytest_llenergy.cli "$@"; }
python() { "$DOCS_PYTHON" "$@"; }
for each in git mkdir cat cp mv; do
    eval "$each() { PATH=\$DOCS_PATH command $each \"\$@\"; }"
done
"""


def commands(text: str, directory: Path) -> list[list[str]]:
    """Return the words of each command in the order of bash, without running any.

    Commands that only run if all others fail, behind ``||``, come last. Raises ``AssertionError`` for syntax
    errors and for programs that are named by a path.
    """
    done, found = _bash(LOOK + text, directory)
    assert done.returncode == 0, f"bash says {done.returncode}\n{done.stderr}"
    failed, others = _bash(LOOK + text, directory, DOCS_STATUS="1")
    assert failed.returncode != NOT_FOUND, f"bash says {NOT_FOUND}\n{failed.stderr}"
    return found + [each for each in others if each not in found]


def run(text: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run a text. Return the finished process, and the commands that did not really run."""
    return _bash(LOOK + RUN + text, directory, PYTEST_ADDOPTS=QUICK)


def _bash(
    script: str, directory: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    log = directory / ".commands"
    log.unlink(missing_ok=True)
    own = {
        "DOCS_COMMANDS": str(log),
        "DOCS_PYTHON": sys.executable,
        "DOCS_PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]),
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{
            f"GIT_{role}_{what}": value
            for role in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "a reader"), ("EMAIL", "reader@example.org"))
        },
    }
    done = subprocess.run(
        [BASH, "--noprofile", "--norc", "-c", script],
        cwd=directory,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    words = log.read_text().split("\0")[:-1] if log.exists() else []
    found = []
    while words:
        count, words = int(words[0]), words[1:]
        found.append(words[:count])
        words = words[count:]
    return done, found
