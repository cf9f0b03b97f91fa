# SPDX-License-Identifier: Apache-2.0
"""What a checkout has that can be imported: where a side's own code would come from."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

#: Directories that namespaces are usually below. Any directory that holds Python could be one.
ROOTS = ("src", "python", "lib")

#: Beside one of these lies a project, whose packages are next to it or one level below.
PROJECTS = ("pyproject.toml", "setup.py", "setup.cfg")


class OwnCode:
    """Modules, packages and namespaces in the files of a checkout, by their top-level name."""

    def __init__(self, files: Iterable[str]) -> None:
        self._packages: dict[str, list[PurePosixPath]] = {}
        self._modules: dict[str, list[PurePosixPath]] = {}
        self._namespaces: dict[str, list[PurePosixPath]] = {}
        paths = sorted(map(PurePosixPath, files))
        self._projects = {path.parent for path in paths if path.name in PROJECTS}
        found = [path for path in paths if path.suffix == ".py"]
        packages = {path.parent for path in found if path.name == "__init__.py"}
        for path in found:
            # What lies in a package is imported below its name.
            top = next((each for each in reversed(_above(path)) if each in packages), None)
            if top is not None:
                _note(self._packages, top.name, top)
            else:
                _note(self._modules, path.stem, path)
            for each in _above(path if top is None else top):
                if each.parent == PurePosixPath() or each.parent.name in ROOTS:
                    _note(self._namespaces, each.name, each)

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
            or above.name in ROOTS
            or bool({above, above.parent} & self._projects - {PurePosixPath()})
        )


def _above(path: PurePosixPath) -> list[PurePosixPath]:
    """The directories that hold a file, the innermost first, without the top."""
    return [each for each in path.parents if each != PurePosixPath()]


def _note(found: dict[str, list[PurePosixPath]], name: str, path: PurePosixPath) -> None:
    known = found.setdefault(name, [])
    if path not in known:
        known.append(path)
