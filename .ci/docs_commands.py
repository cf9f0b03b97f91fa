# SPDX-License-Identifier: Apache-2.0
"""Run the commands of README.md and docs/tutorial.md literally: python .ci/docs_commands.py [TEXT ...].

Each page has a reader with a home, caches and a lease directory of their own, so that models and wheels come
from pip alone, whose downloads are kept. Blocks with one of the texts are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.pages import Block, blocks  # noqa: E402 - the package is not installed where this script runs

#: What a reader has set up for git. The address of the repository, with its placeholder, is this checkout.
GIT = f"""[user]
    name = A Reader
    email = reader@example.org
[safe]
    directory = *
[url "{ROOT}"]
    insteadOf = https://github.com/OWNER/pytest-llenergy
"""

#: Settings of whoever runs this script that would reach what they have installed, cached or configured.
THEIRS = ("LLENERGY_CACHE", "LLENERGY_LOCK", "HF_", "PYTEST", "PYTHON", "TOX", "VIRTUAL_ENV", "XDG_")


class Reader:
    """A user at a shell, whose directory and exported variables last from block to block."""

    def __init__(self, home: Path, left_out: Iterable[str]) -> None:
        self.home, self.left_out = home, tuple(left_out)
        home.mkdir()
        (home / ".gitconfig").write_text(GIT)
        cache = subprocess.run(
            [sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True
        )
        own = str(Path(sys.executable).parent)
        path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != own)
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(THEIRS)
        } | {
            "HOME": str(home),
            "LLENERGY_LOCK_DIR": str(home),
            "PATH": path,
            "PIP_CACHE_DIR": cache.stdout.strip(),
        }

    def follow(self, page: Iterable[Block], directory: Path) -> None:
        """Write the files of a page and run its commands, from a directory. Exits if a block fails."""
        directory.mkdir(exist_ok=True)
        self.variables["PWD"] = str(directory)
        for block in page:
            for note, mode in (("file", "w"), ("append", "a")):
                if name := block.said(note):
                    path = Path(self.variables["PWD"]) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open(mode) as file:
                        file.write(block.code)
            if any(text in block.commands for text in self.left_out):
                print(f"\n=== {block}: left out", flush=True)
            elif block.commands:
                self.run(block.commands, str(block), (block.said("exit") or "0").split(" or "))

    def run(self, commands: str, name: str, expected: Iterable[str] = ("0",)) -> None:
        """Run commands, of which only the last may fail; ``expected`` are its exit codes."""
        print(f"\n=== {name}\n{commands.rstrip()}\n---", flush=True)
        start = time.monotonic()
        after = self.home / "variables"
        script = f"trap 'env -0 >{after}' EXIT; set -e\n{commands}"
        command = ["bash", "--noprofile", "--norc", "-c", script]
        code = subprocess.run(command, env=self.variables, cwd=self.variables["PWD"], check=False).returncode
        print(f"=== {name}: exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
        if str(code) not in expected:
            sys.exit(f"{name}: exit code {code}, not {' or '.join(expected)}, from:\n{commands}")
        self.variables = dict(each.split("=", 1) for each in after.read_text().split("\0")[:-1])


def main(*left_out: str) -> None:
    """Follow both pages."""
    readme, tutorial = (blocks(ROOT / name) for name in ("README.md", "docs/tutorial.md"))
    (install, *_) = (index for index, block in enumerate(readme) if "pip install" in block.commands)
    with tempfile.TemporaryDirectory() as scratch:
        reader = Reader(Path(scratch) / "home", left_out)
        reader.run(
            f"python3 -m venv {scratch}/venv && . {scratch}/venv/bin/activate", "a virtual environment"
        )
        reader.follow([readme[install]], ROOT)
        # The test at the top of the page, in a project of its own, once there is something to run it with.
        reader.follow(readme[:install], Path(scratch) / "project")
        reader.follow(readme[install + 1 :], ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        Reader(Path(scratch) / "home", left_out).follow(tutorial, Path(scratch) / "work")


if __name__ == "__main__":
    main(*sys.argv[1:])
