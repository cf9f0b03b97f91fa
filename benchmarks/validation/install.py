# SPDX-License-Identifier: Apache-2.0
"""Make a directory with which this checkout is as if it were installed. Needs the standard library alone.

python benchmarks/validation/install.py DIRECTORY

pytest finds the plugin by the metadata that is written there. Packages that the plugin needs and that are not
here are taken from ``benchmarks/validation/wheels`` (or ``LLENERGY_VALIDATION_WHEELS``), which ``wheels.sh``
fills where there is a network.
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

#: Modules of the plugin's dependencies (pyproject.toml), and what the parts need besides, by distribution.
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
    # What rich is made of.
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "pygments": "pygments",
}


def version() -> str:
    """Of this checkout."""
    text = (ROOT / "pytest_llenergy" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def write_metadata(directory: Path) -> None:
    """What an installed distribution has, as far as pytest and the plugin look at it."""
    info = directory / f"pytest_llenergy-{version()}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pytest-llenergy\nVersion: {version()}\n")
    (info / "entry_points.txt").write_text("[pytest11]\nllenergy = pytest_llenergy.plugin\n")


def add_missing(directory: Path) -> list[str]:
    """Install what is missing from the wheels. Returns what is missing there too."""
    missing = [name for name, module in NEEDED.items() if find_spec(module) is None]
    wheels = [path.name.lower().replace("_", "-") for path in WHEELS.glob("*.whl")]
    here = [name for name in missing if any(wheel.startswith(f"{name}-") for wheel in wheels)]
    if here:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-cache-dir"]
        apart = ["--no-index", "--no-deps", "--find-links", str(WHEELS), "--target", str(directory)]
        subprocess.run([sys.executable, "-m", "pip", "install", *quiet, *apart, *here], check=True)
    return [name for name in missing if name not in here]


def main() -> None:
    """Raises ``SystemExit`` with what to do where something is missing."""
    directory = Path(sys.argv[1])
    lacking = add_missing(directory)
    if lacking:
        version_here = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(lacking)}. Where there is a network: pip install "
            f"{' '.join(lacking)}. For a machine without one: benchmarks/validation/wheels.sh {version_here} "
            "on another, and bring benchmarks/validation/wheels along."
        )
    write_metadata(directory)


if __name__ == "__main__":
    main()
