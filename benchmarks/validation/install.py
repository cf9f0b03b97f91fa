# SPDX-License-Identifier: Apache-2.0
"""Prepare a directory for PYTHONPATH that makes this checkout act as if it were installed.

Uses only the standard library:

    python benchmarks/validation/install.py DIRECTORY

pytest finds the plugin through the metadata written there. Missing dependencies are installed from
``benchmarks/validation/wheels`` (or ``LLENERGY_VALIDATION_WHEELS``), which ``wheels.sh`` fills on a machine
with a network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = Path(os.environ.get("LLENERGY_VALIDATION_WHEELS", HERE / "wheels"))

#: Modules of the plugin's dependencies (pyproject.toml) and of what the parts need, by distribution.
NEEDED = {
    "cloudpickle": "cloudpickle",
    "filelock": "filelock",
    "msgspec": "msgspec",
    "nvidia-ml-py": "pynvml",
    "platformdirs": "platformdirs",
    "psutil": "psutil",
    "pytest": "pytest",
    "rich": "rich",
    "numpy": "numpy",
    # Dependencies of rich.
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "pygments": "pygments",
}


def version() -> str:
    """Return the version of this checkout."""
    text = (ROOT / "pytest_llenergy" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def write_metadata(directory: Path) -> None:
    """Write the distribution metadata that pytest and the plugin read."""
    info = directory / f"pytest_llenergy-{version()}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pytest-llenergy\nVersion: {version()}\n")
    (info / "entry_points.txt").write_text("[pytest11]\nllenergy = pytest_llenergy.plugin\n")


def add_missing(directory: Path) -> list[str]:
    """Install missing packages from the wheels. Returns those for which there is no wheel."""
    missing = [name for name, module in NEEDED.items() if find_spec(module) is None]
    wheels = [path.name.lower().replace("_", "-") for path in WHEELS.glob("*.whl")]
    here = [name for name in missing if any(wheel.startswith(f"{name}-") for wheel in wheels)]
    if here:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-cache-dir"]
        apart = ["--no-index", "--no-deps", "--find-links", str(WHEELS), "--target", str(directory)]
        subprocess.run([sys.executable, "-m", "pip", "install", *quiet, *apart, *here], check=True)
    return [name for name in missing if name not in here]


def main() -> None:
    """Write the metadata and install missing packages; exits with instructions if any has no wheel."""
    directory = Path(sys.argv[1])
    lacking = add_missing(directory)
    if lacking:
        version_here = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(lacking)}. With a network: pip install "
            f"{' '.join(lacking)}. Without one: run benchmarks/validation/wheels.sh {version_here} "
            "on another machine and copy benchmarks/validation/wheels here."
        )
    write_metadata(directory)


if __name__ == "__main__":
    main()
