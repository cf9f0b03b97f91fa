# SPDX-License-Identifier: Apache-2.0
"""Check that each side imports its own code.

If the project is installed from the user's checkout, or from anywhere else, both sides import the same code
no matter what was checked out for them, and nothing can differ. So what the first session of each side has
imported is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

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


class Imports(msgspec.Struct):
    """What a process of a session imported.

    ``modules`` has the places of each top-level module, ``prefix`` is the environment of the interpreter.
    """

    prefix: str
    modules: dict[str, list[str]]


def check_imports(
    root: Path, venv: Path | None, lists: Sequence[Path], others: Sequence[Path], side: str
) -> None:
    """Check what a session imported.

    Args:
        root: The checkout of the side.
        venv: The environment that was created for it, if any.
        lists: Directories in which its processes listed their imports.
        others: Checkouts that it must not import from: that of the user, and that of the other side.
        side: Name of the side.

    Raises:
        PlanError: If a module did not come from the side's own checkout.
    """
    own_places = [root.resolve(), *([venv.resolve()] if venv is not None else [])]
    projects = Repository(root).list_projects()
    parents = [*map(Path, SOURCE_ROOTS), *(Path(each, below) for each in projects for below in (".", "src"))]
    for file in sorted(file for directory in lists for file in directory.glob("*.json")):
        found = msgspec.json.decode(file.read_bytes(), type=Imports)
        for name, places in found.modules.items():
            paths = [Path(place) for place in places]
            # An environment may be inside the checkout.
            if any(_within(path, own_places[1:]) for path in paths) or any(
                _within(path, own_places) and not _is_installed(path) for path in paths
            ):
                continue
            place, own = paths[0], _find_own(name, root, parents)
            foreign = _within(place, [each.resolve() for each in others]) and not (
                _is_installed(place) or _within(place, own_places) or _is_environment(place, found, others)
            )
            if own is not None or foreign:
                expected = f" instead of its own {own}" if own is not None else ", outside its checkout"
                raise PlanError(f"{side} imported {name} from {place}{expected}, {SAME_CODE}")


def _find_own(name: str, root: Path, parents: Sequence[Path]) -> str | None:
    """Return the checkout's own module or package of this name, relative to its top, if there is one."""
    path = Path(*name.split("."))
    if path.parts[0] in sys.stdlib_module_names:
        return None
    places = [parent / path for parent in parents]
    found = [str(place) for place in places if (root / place / "__init__.py").is_file()]
    found += [f"{place}.py" for place in places if (root / f"{place}.py").is_file()]
    return found[0] if found else None


def _is_environment(place: Path, found: Imports, checkouts: Sequence[Path]) -> bool:
    """Whether a path is in the interpreter's environment, itself in a checkout, such as ``.venv``."""
    prefix = Path(found.prefix).resolve()
    return _within(place, [prefix]) and _within(prefix, [each.resolve() for each in checkouts])


def _is_installed(place: Path) -> bool:
    return not INSTALL_DIRECTORIES.isdisjoint(place.parts)


def _within(place: Path, directories: Sequence[Path]) -> bool:
    return any(place == each or each in place.parents for each in directories)
