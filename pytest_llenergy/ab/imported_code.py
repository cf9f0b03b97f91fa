# SPDX-License-Identifier: Apache-2.0
"""Check that each side imports its own code.

If the project is installed from the user's checkout, or from anywhere else, both sides import the same code
no matter what was checked out for them, and nothing can differ. So what the first session of each side has
imported is checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_llenergy.ab.checkouts import Repository
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import MALFORMED
from pytest_llenergy.record.files import read_limited

#: Where a checkout may have the modules that it installs, besides its projects in subfolders.
SOURCE_ROOTS = (".", "src", "python", "lib")

#: End of the message.
SAME_CODE = (
    "so both sides would measure the same code; create an environment for each: --setup 'pip install -e .'"
)

#: Names of the directories of installed packages.
INSTALL_DIRECTORIES = ("site-packages", "dist-packages")


#: Run by a side's interpreter in its directory: prints what it lacks and where it is.
PROBE = """
import importlib.util, json, sys
names = {"pytest": "pytest", "pytest-llenergy": "pytest_llenergy"}
missing = [name for name, module in names.items() if importlib.util.find_spec(module) is None]
print(json.dumps({"missing": missing, "prefixes": [sys.prefix, sys.base_prefix]}))
"""


@dataclass(frozen=True)
class InterpreterInfo:
    """What ``PROBE`` prints: the packages that are not installed, and the directories of the environment."""

    missing: list[str]
    prefixes: list[str]

    def contains(self, place: Path, repository: Path) -> bool:
        """Whether a path is in an environment inside the user's checkout, such as ``.venv``.

        A checkout below the system's prefix, such as ``/usr/src``, does not count as an environment.
        """
        prefixes = [Path(each).resolve() for each in self.prefixes]
        return any(_within(place, each) for each in prefixes if _within(each, repository.resolve()))


def inspect_interpreter(side: Side) -> InterpreterInfo:
    """Ask a side's interpreter where it is, and whether it can measure.

    Raises:
        PlanError: If it does not run, or has no pytest or no pytest-llenergy.
    """
    try:
        done = subprocess.run(
            [str(side.python), "-c", PROBE],
            cwd=side.directory,
            env=dict(side.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout.splitlines()
        info = InterpreterInfo(**json.loads(output[-1])) if done.returncode == 0 else None
    except OSError as error:
        raise PlanError(f"{side.name}: {side.python} cannot be run ({error.strerror})") from None
    if info is None:
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise PlanError(f"{side.name}: {side.python} does not run: {lines[-1]}")
    if info.missing:
        raise PlanError(
            f"{side.name}: {info.missing[0]} is not installed for {side.python}; install it, for example in "
            "--setup"
        )
    return info


def check_imported_modules(
    side: Side, info: InterpreterInfo, modules: Sequence[Path], repository: Path, other: Path
) -> None:
    """Check what a session imported.

    Args:
        side: The side of the session.
        info: What the interpreter printed.
        modules: Directories in which the session listed its imports.
        repository: The user's checkout.
        other: The checkout of the other side.

    Raises:
        PlanError: If a module did not come from the side's own checkout.
    """
    projects = Repository(side.root).list_projects()
    parents = [*map(Path, SOURCE_ROOTS), *(Path(each, below) for each in projects for below in (".", "src"))]
    for name, places in _read_imports(modules):
        if any(_belongs_to_side(place, side) for place in places):
            continue
        place = places[0]
        own = _find_own(name, side.root, parents)
        installed = _is_installed(place) or info.contains(place, repository)
        if own is None and (installed or not _is_foreign(place, side, repository, other)):
            continue
        expected = f" instead of its own {own}" if own is not None else ", outside its checkout"
        raise PlanError(f"{side.name} imported {name} from {place}{expected}, {SAME_CODE}")


def _find_own(name: str, root: Path, parents: Sequence[Path]) -> str | None:
    """Return the checkout's own module or package of this name, relative to its top, if there is one."""
    path = Path(*name.split("."))
    if path.parts[0] in sys.stdlib_module_names:
        return None
    places = [parent / path for parent in parents]
    found = [str(place) for place in places if (root / place / "__init__.py").is_file()]
    found += [f"{place}.py" for place in places if (root / f"{place}.py").is_file()]
    return found[0] if found else None


def _read_imports(modules: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    for file in sorted(file for directory in modules for file in directory.glob("*.json")):
        try:
            found = msgspec.json.decode(read_limited(file), type=dict[str, list[str]])
        except (OSError, *MALFORMED) as error:
            raise PlanError(
                f"{file}: not the imports of a session ({error}); llenergy ab --fresh discards the "
                "measurements of this comparison and starts again"
            ) from None
        for name, places in found.items():
            yield name, [Path(place) for place in places]


def _belongs_to_side(place: Path, side: Side) -> bool:
    """Whether a path is in the side's checkout, or in the environment that was created for it."""
    if side.venv is not None and _within(place, side.venv.resolve()):
        return True
    # An environment may be inside the checkout.
    return _within(place, side.root.resolve()) and not _is_installed(place)


def _is_installed(place: Path) -> bool:
    return any(part in place.parts for part in INSTALL_DIRECTORIES)


def _is_foreign(place: Path, side: Side, repository: Path, other: Path) -> bool:
    """Whether a path is in the user's checkout or that of the other side, and not in this side's."""
    if _within(place, side.root.resolve()):
        return False
    places: Sequence[Path] = (repository.resolve(), other.resolve())
    return any(_within(place, each) for each in places)


def _within(place: Path, directory: Path) -> bool:
    return place == directory or directory in place.parents
