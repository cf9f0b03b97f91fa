# SPDX-License-Identifier: Apache-2.0
"""Environments of the compared tools; as a script, it prints the path of an environment's interpreter."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.record.base import cache_directory

#: Oldest Python for which the pinned versions exist.
MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Peers:
    """Packages pinned in a file of a folder next to this one; cached under ``name``."""

    folder: str
    name: str
    takes: str
    file: str = "requirements.txt"

    @property
    def requirements(self) -> Path:
        """Path of the pinned requirements."""
        return Path(__file__).resolve().parent / self.folder / self.file


#: Zeus and CodeCarbon, with this package's own dependencies.
METERS = Peers("accuracy", "meters", "a minute, 0.6 GB")
#: optimum-benchmark needs an older transformers than the plugin, so they cannot share an environment.
OPTIMUM_BENCHMARK = Peers("optimum_benchmark", "optimum-benchmark", "some minutes, 2 GB")
#: Clients that put a load on a server. Their requirements contradict one another.
GUIDELLM = Peers("serving_peers", "guidellm", "a minute, 0.6 GB", "requirements-guidellm.txt")
AIPERF = Peers("serving_peers", "aiperf", "a minute, 0.9 GB", "requirements-aiperf.txt")
VLLM_BENCH = Peers("serving_peers", "vllm-bench", "some minutes, 3.5 GB", "requirements-vllm-bench.txt")

#: Environments by the name that this script takes.
KNOWN = {
    "accuracy": METERS,
    "optimum_benchmark": OPTIMUM_BENCHMARK,
    **{peers.name: peers for peers in (GUIDELLM, AIPERF, VLLM_BENCH)},
}


def peer_python(peers: Peers) -> Path:
    """Return the interpreter of an environment in the user's cache, created on first use.

    Raises:
        SystemExit: This Python is too old.
        CalledProcessError: The environment cannot be created.
    """
    digest = hashlib.sha256(peers.requirements.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    directory = cache_directory() / "peers" / f"{peers.name}-py{version}-{digest}"
    python, finished = directory / "bin" / "python", directory / "finished"
    if finished.exists():
        return python
    if sys.version_info < MIN_PYTHON:
        least = ".".join(map(str, MIN_PYTHON))
        raise SystemExit(
            f"the pinned peers need Python {least}; give --peer-python with an existing environment"
        )
    print(f"creating the peers' environment in {directory}: {peers.takes}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(peers.requirements)]
    # Only the path goes to standard output.
    subprocess.run(install, check=True, stdout=sys.stderr)
    finished.touch()
    return python


def main() -> None:
    """Create the environment if needed and print its interpreter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=KNOWN, default="accuracy", help="default: accuracy")
    print(peer_python(KNOWN[parser.parse_args().name]))


if __name__ == "__main__":
    main()
