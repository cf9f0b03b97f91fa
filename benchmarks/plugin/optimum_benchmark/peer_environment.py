# SPDX-License-Identifier: Apache-2.0
"""The peer's environment: its transformers is older than the plugin's, so the two cannot share one."""

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
    """The interpreter of the peer's environment, made on first use and kept in the user's cache."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    directory = cache_root() / "peers" / f"optimum-benchmark-py{version}-{digest}"
    python, finished = directory / "bin" / "python", directory / "finished"
    if finished.exists():
        return python
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        raise SystemExit(
            f"the pinned peer needs Python {least}; give --peer-python of an environment with it"
        )
    print(f"making the peer's environment in {directory}: some minutes, 2 GB", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
    finished.touch()
    return python
