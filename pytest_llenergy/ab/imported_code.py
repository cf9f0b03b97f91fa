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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from pytest_llenergy.ab.checkouts import Repository
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import MALFORMED
from pytest_llenergy.record.files import read_limited

#: Directories that usually hold packages. Any other directory with Python files could be a namespace.
SOURCE_ROOTS = ("src", "python", "lib")

#: Files that mark a project. Its packages are next to them or one level below.
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")

#: End of the message.
SAME_CODE = (
    "so both sides would measure the same code; create an environment for each: --setup 'pip install -e .'"
)

#: Names of the directories of installed packages.
INSTALL_DIRECTORIES = ("site-packages", "dist-packages")


class ImportableCode:
    """Packages, modules and namespaces among the files of a checkout, by their top-level name."""

    def __init__(self, files: Iterable[str]) -> None:
        self._packages: dict[str, list[PurePosixPath]] = {}
        self._modules: dict[str, list[PurePosixPath]] = {}
        self._namespaces: dict[str, list[PurePosixPath]] = {}
        paths = sorted(map(PurePosixPath, files))
        self._projects = {path.parent for path in paths if path.name in PROJECT_FILES}
        found = [path for path in paths if path.suffix == ".py"]
        packages = {path.parent for path in found if path.name == "__init__.py"}
        for path in found:
            # A module in a package is imported under the name of the package.
            top = next((each for each in reversed(_parents(path)) if each in packages), None)
            if top is not None:
                _add(self._packages, top.name, top)
            else:
                _add(self._modules, path.stem, path)
            for each in _parents(path if top is None else top):
                if each.parent == PurePosixPath() or each.parent.name in SOURCE_ROOTS:
                    _add(self._namespaces, each.name, each)

    def find(self, name: str, place: Path) -> str | None:
        """Return the checkout's own path of a module that was imported from ``place``, or ``None``.

        At the top and below ``src`` any kind matches. Elsewhere the kind must be the same, because a script
        may have the name of a package that it uses.
        """
        parent, _, last = name.rpartition(".")
        if (parent or last) in sys.stdlib_module_names or name == "test":
            return None
        if place.stem == "__init__":
            kind = self._packages
        else:
            kind = self._modules if place.suffix else self._namespaces
        alike = [each for each in kind.get(last, []) if self._is_importable(each, parent)]
        if parent:
            return next(map(str, alike), None)
        sure = [
            each
            for found in (self._packages, self._modules)
            for each in found.get(name, [])
            if str(each.parent) in (".", "src")
        ]
        return next(map(str, [*sure, *alike]), None)

    def _is_importable(self, path: PurePosixPath, parent: str) -> bool:
        """Whether the path is importable, and not a stub or a vendored copy."""
        if parent:
            return path.parent.name == parent
        above = path.parent
        return (
            above == PurePosixPath()
            or above.name in SOURCE_ROOTS
            or bool({above, above.parent} & self._projects - {PurePosixPath()})
        )


def _parents(path: PurePosixPath) -> list[PurePosixPath]:
    """The directories above a file, innermost first, without the top."""
    return [each for each in path.parents if each != PurePosixPath()]


def _add(found: dict[str, list[PurePosixPath]], name: str, path: PurePosixPath) -> None:
    known = found.setdefault(name, [])
    if path not in known:
        known.append(path)


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
    code = ImportableCode(Repository(side.root).list_files())
    for name, places in _read_imports(modules):
        if any(_belongs_to_side(place, side) for place in places):
            continue
        place = places[0]
        own = code.find(name, place)
        installed = _is_installed(place) or info.contains(place, repository)
        if own is None and (installed or not _is_foreign(place, side, repository, other)):
            continue
        expected = f" instead of its own {own}" if own is not None else ", outside its checkout"
        raise PlanError(f"{side.name} imported {name} from {place}{expected}, {SAME_CODE}")


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
