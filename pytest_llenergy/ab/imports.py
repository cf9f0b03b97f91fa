# SPDX-License-Identifier: Apache-2.0
"""Check that each side imports its own code.

If the project is installed from the user's checkout, or from anywhere else, both sides import the same code
no matter what was checked out for them, and nothing can differ. So what the first session of each side has
imported is checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_llenergy.ab.repository import Repository
from pytest_llenergy.errors import PlanError

#: Where a checkout may have the modules that it installs, besides its projects in subfolders.
SOURCE_ROOTS = (".", "src", "python", "lib")

#: End of the message.
SAME_CODE = (
    "so both sides would measure the same code; create an environment for each: --setup 'pip install -e .'"
)

#: Names of the directories of installed packages.
INSTALL_DIRECTORIES = {"site-packages", "dist-packages"}


def list_own_modules(root: Path) -> dict[str, str]:
    """Return the importable modules and packages of a checkout by their names, with their paths in it."""
    files = [Path(name) for name in Repository(root).list_files("*.py", "pyproject.toml", "*/pyproject.toml")]
    known = set(files)
    projects = {each.parent for each in files if each.name in ("pyproject.toml", "setup.py")}
    roots = [*map(Path, SOURCE_ROOTS), *sorted(projects), *(each / "src" for each in sorted(projects))]
    found: dict[str, str] = {}
    for file in files:
        place = file.parent if file.name == "__init__.py" else file
        if file.suffix != ".py" or place.parent / "__init__.py" in known:
            # Part of a package.
            continue
        for parent in roots:
            if place != parent and place.is_relative_to(parent):
                name = ".".join(place.relative_to(parent).with_suffix("").parts)
                found.setdefault(name, str(place))
    return {name: place for name, place in found.items() if name not in sys.stdlib_module_names}


def check_imports(side: str, root: Path, venv: Path | None, lists: Iterable[Path]) -> None:
    """Check where a session imported the modules of its checkout from.

    Args:
        side: Name of the side.
        root: Its checkout.
        venv: The environment that was created for it, if any.
        lists: What its processes wrote.

    Raises:
        PlanError: If a module did not come from the side's own checkout.
    """
    own = list_own_modules(root)
    for file in sorted(lists):
        for name, place in json.loads(file.read_text()).items():
            path = Path(place)
            # A copy that is installed is not the checkout, even if the environment is in it.
            in_checkout = path.is_relative_to(root.resolve()) and INSTALL_DIRECTORIES.isdisjoint(path.parts)
            if not in_checkout and not (venv is not None and path.is_relative_to(venv.resolve())):
                raise PlanError(
                    f"{side} imported {name} from {place} instead of its own {own[name]}, {SAME_CODE}"
                )
