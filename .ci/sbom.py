# SPDX-License-Identifier: Apache-2.0
"""Write a software bill of materials in CycloneDX format: python .ci/sbom.py ENVIRONMENT FILE."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pytest_llenergy import __version__  # noqa: E402 - the package is not installed where this script runs


def main(environment: str, file: str) -> None:
    """Write the file. Raises ``CalledProcessError`` if cyclonedx-py fails."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--mc-type", "library", "--validate"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", environment]
    listed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    # It does not know where pyproject.toml says that the version is.
    listed["metadata"]["component"]["version"] = __version__
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
