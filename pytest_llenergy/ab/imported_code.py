# SPDX-License-Identifier: Apache-2.0
"""Check that a side imports its own code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_llenergy.ab.checkouts import Repository
from pytest_llenergy.ab.schedule import Side
from pytest_llenergy.errors import PlanError

# What a checkout has that can be imported: where a side's own code would come from.

#: Directories that namespaces are usually below. Any directory that holds Python could be one.
SOURCE_ROOTS = ("src", "python", "lib")

#: Beside one of these lies a project, whose packages are next to it or one level below.
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


class ImportableCode:
    """Modules, packages and namespaces in the files of a checkout, by their top-level name."""

    def __init__(self, files: Iterable[str]) -> None:
        self._packages: dict[str, list[PurePosixPath]] = {}
        self._modules: dict[str, list[PurePosixPath]] = {}
        self._namespaces: dict[str, list[PurePosixPath]] = {}
        paths = sorted(map(PurePosixPath, files))
        self._projects = {path.parent for path in paths if path.name in PROJECT_FILES}
        found = [path for path in paths if path.suffix == ".py"]
        packages = {path.parent for path in found if path.name == "__init__.py"}
        for path in found:
            # What lies in a package is imported below its name.
            top = next((each for each in reversed(_parents(path)) if each in packages), None)
            if top is not None:
                _add(self._packages, top.name, top)
            else:
                _add(self._modules, path.stem, path)
            for each in _parents(path if top is None else top):
                if each.parent == PurePosixPath() or each.parent.name in SOURCE_ROOTS:
                    _add(self._namespaces, each.name, each)

    def of(self, name: str, place: Path) -> str | None:
        """What the checkout has itself of something that was imported from ``place``; ``None`` for nothing.

        At the top and below ``src`` whatever has the name; elsewhere what is of the same kind: a script
        may be called as a package is that it uses.
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
        """Whether it would be found, and is no fake or copy of what others have made."""
        if parent:
            return path.parent.name == parent
        above = path.parent
        return (
            above == PurePosixPath()
            or above.name in SOURCE_ROOTS
            or bool({above, above.parent} & self._projects - {PurePosixPath()})
        )


def _parents(path: PurePosixPath) -> list[PurePosixPath]:
    """The directories that hold a file, the innermost first, without the top."""
    return [each for each in path.parents if each != PurePosixPath()]


def _add(found: dict[str, list[PurePosixPath]], name: str, path: PurePosixPath) -> None:
    known = found.setdefault(name, [])
    if path not in known:
        known.append(path)


# Does a side run its own code?
#
# With the project installed from the user's checkout, or from anywhere else, both sides import one and the
# same code whatever was checked out for them, and nothing can differ. Looked at twice: what the environment
# names before anything is measured, and what was imported after the first session of a side.

#: Asked of a side's interpreter, in its directory: where its modules can come from.
PROBE = r"""
import ast, importlib.metadata as metadata, importlib.util, json, os, site, sys
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

def file_of(url):
    parsed = urlparse(url)
    return url2pathname(unquote(parsed.path)) if parsed.scheme == "file" else None

named = []
for name in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    if name:
        named.append(["PYTHONPATH", os.path.abspath(name)])
for dist in metadata.distributions():
    try:
        told = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        continue
    place = file_of(told.get("url", ""))
    if place:
        how = "editable" if told.get("dir_info", {}).get("editable") else "installed"
        named.append([how + " " + str(dist.metadata["Name"]), place])
for path in sys.path[1:]:
    named.append(["sys.path", os.path.abspath(path)])
    try:
        finders = [each for each in os.listdir(path) if each[:12] == "__editable__" and each[-3:] == ".py"]
    except OSError:
        continue
    for finder in finders:
        with open(os.path.join(path, finder), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in tree.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(getattr(target, "id", "") == "MAPPING" for target in targets):
                named += [["editable " + name, place] for name, place in ast.literal_eval(node.value).items()]
try:
    version = metadata.version("pytest-llenergy")
except metadata.PackageNotFoundError:
    version = "unknown" if importlib.util.find_spec("pytest_llenergy") else None
print(json.dumps({
    "named": named, "version": version, "pytest": importlib.util.find_spec("pytest") is not None,
    "prefixes": [sys.prefix, sys.base_prefix],
}))
"""

#: Where installed packages are.
INSTALL_DIRECTORIES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class InterpreterInfo:
    """What an interpreter says. ``named`` are pairs of who names a place, and the place."""

    named: list[list[str]]
    prefixes: list[str]
    pytest: bool
    version: str | None

    def holds(self, place: Path, repository: Path) -> bool:
        """Whether a place is in an environment that lies in the checkout, such as ``.venv``.

        A checkout that lies below the prefix of the system, such as ``/usr/src``, is in none.
        """
        prefixes = [Path(each).resolve() for each in self.prefixes]
        return any(_within(place, each) for each in prefixes if _within(each, repository.resolve()))


def inspect_interpreter(side: Side) -> InterpreterInfo:
    """Ask a side's interpreter.

    Raises ``PlanError`` for one that does not run, and one that has no pytest or no pytest-llenergy.
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
        told = InterpreterInfo(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None
    except OSError as error:
        raise PlanError(f"{side.name}: {side.python} cannot be run ({error.strerror})") from None
    if told is None:
        lines = done.stderr.strip().splitlines() or ["no reason was given"]
        raise PlanError(f"{side.name}: {side.python} does not run: {lines[-1]}")
    for name, there in (("pytest", told.pytest), ("pytest-llenergy", told.version is not None)):
        if not there:
            raise PlanError(
                f"{side.name}: {name} is not installed for {side.python}; install it, with --setup as one of "
                "its commands"
            )
    return told


def check_import_sources(side: Side, told: InterpreterInfo, repository: Path, other: Path) -> None:
    """Refuse an environment that names the user's checkout, or that of the ``other`` side.

    Raises ``PlanError`` saying who names it.
    """
    for who, named in told.named:
        place = Path(named).resolve()
        if not _is_foreign(place, side, repository, other) or told.holds(place, repository):
            continue
        raise PlanError(
            f"{side.name} would import its code from {place} ({who}) and not from its own checkout, so that "
            "both sides measure the same; give each an environment of its own: --setup 'pip install -e .'"
        )


def check_imported_modules(
    side: Side, told: InterpreterInfo, modules: Sequence[Path], repository: Path, other: Path
) -> None:
    """The same of what a session has really imported. Raises ``PlanError`` naming the first module."""
    code = ImportableCode(Repository(side.root).files())
    for name, places in _read_imports(modules):
        if any(_belongs_to_side(place, side) for place in places):
            continue
        place = places[0]
        own = code.of(name, place)
        installed = _is_installed(place) or told.holds(place, repository)
        if own is None and (installed or not _is_foreign(place, side, repository, other)):
            continue
        whose = f"although it has {own}" if own is not None else "which is not its checkout"
        raise PlanError(
            f"{side.name} has imported {name} from {place}, {whose}, so that both sides measure the same; "
            "give each an environment of its own: --setup 'pip install -e .'"
        )


def _read_imports(modules: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    for file in sorted(file for directory in modules for file in directory.glob("*.json")):
        found: Mapping[str, Any] = json.loads(file.read_text())
        for name, places in found.items():
            yield name, [Path(place) for place in places]


def _belongs_to_side(place: Path, side: Side) -> bool:
    """Whether it is of the checkout or of the environment that was made for this side."""
    if side.venv is not None and _within(place, side.venv.resolve()):
        return True
    # An environment may lie in the checkout.
    return _within(place, side.root.resolve()) and not _is_installed(place)


def _is_installed(place: Path) -> bool:
    return any(part in place.parts for part in INSTALL_DIRECTORIES)


def _is_foreign(place: Path, side: Side, repository: Path, other: Path) -> bool:
    """Whether this is code of the user's checkout or of the other side, and not of this one."""
    if _within(place, side.root.resolve()):
        return False
    places: Sequence[Path] = (repository.resolve(), other.resolve())
    return any(_within(place, each) for each in places)


def _within(place: Path, directory: Path) -> bool:
    return place == directory or directory in place.parents
