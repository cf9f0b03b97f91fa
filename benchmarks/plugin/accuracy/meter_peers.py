# SPDX-License-Identifier: Apache-2.0
"""The environment of Zeus and CodeCarbon; run as a script, it prints the path of its interpreter."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from pytest_llenergy.model.places import cache_root

REQUIREMENTS = Path(__file__).resolve().with_name("requirements.txt")
#: Oldest Python for which the pinned versions exist.
LEAST_PYTHON = (3, 11)


def peer_python() -> Path:
    """The interpreter of the peers' environment, made on first use and kept in the user's cache."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    directory = cache_root() / "peers" / f"meters-py{version}-{digest}"
    python, finished = directory / "bin" / "python", directory / "finished"
    if finished.exists():
        return python
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        raise SystemExit(
            f"the pinned peers need Python {least}; give --peer-python of an environment with it"
        )
    print(f"making the peers' environment in {directory}: a minute, 0.6 GB", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
    finished.touch()
    return python


if __name__ == "__main__":
    print(peer_python())
