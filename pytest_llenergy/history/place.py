# SPDX-License-Identifier: Apache-2.0
"""Where a history is kept: a directory, or whatever fsspec reaches.

A session is a file of its own, written once and never again. Nothing is read to be written, so that any
number of machines may add at once, and a store of objects that cannot append will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pytest_llenergy.errors import ReportError
from pytest_llenergy.history.entry import SUFFIX
from pytest_llenergy.report.file import replace_file
from pytest_llenergy.report.remote import file_system, in_time, is_address, shown


class Place(Protocol):
    """Folders of files, one level deep."""

    name: str

    def folders(self) -> list[str]:
        """Names of all folders; empty where there is nothing yet."""

    def files(self, folder: str) -> list[str]:
        """Names of the files of a history in it, in order."""

    def read(self, folder: str, file: str) -> bytes:
        """A whole file."""

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """Write a file whole, unless there is one; whether it was written."""


def place_at(text: str) -> Place:
    """A directory, or an address. Raises ``ReportError`` for one that cannot be reached."""
    return Remote(text) if is_address(text) else Directory(Path(text))


class Directory:
    """On this host. Every method raises ``ReportError``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name: str = str(root)

    def folders(self) -> list[str]:
        """As ``Place``."""
        return self._names(self._root, directories=True)

    def files(self, folder: str) -> list[str]:
        """As ``Place``."""
        return [name for name in self._names(self._root / folder, directories=False) if name.endswith(SUFFIX)]

    def read(self, folder: str, file: str) -> bytes:
        """As ``Place``."""
        path = self._root / folder / file
        try:
            return path.read_bytes()
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """As ``Place``. Two who write at once write the same, so that the last of them does no harm."""
        path = self._root / folder / file
        try:
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None
        replace_file(path, data)
        return True

    def _names(self, path: Path, *, directories: bool) -> list[str]:
        try:
            return sorted(
                each.name
                for each in path.iterdir()
                if each.is_dir() == directories and not each.name.startswith(".")
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None


class Remote:
    """Behind fsspec. Every method raises ``ReportError``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.name: str = shown(address)
        # Some protocols connect at once.
        self._system, root = in_time(address, lambda: file_system(address))
        self._root = root.rstrip("/")

    def folders(self) -> list[str]:
        """As ``Place``."""
        return self._names(self._root, "directory")

    def files(self, folder: str) -> list[str]:
        """As ``Place``."""
        return [name for name in self._names(f"{self._root}/{folder}", "file") if name.endswith(SUFFIX)]

    def read(self, folder: str, file: str) -> bytes:
        """As ``Place``."""
        path = f"{self._root}/{folder}/{file}"
        return in_time(self._address, lambda: bytes(self._system.cat_file(path)))

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """As ``Place``."""
        path = f"{self._root}/{folder}/{file}"

        def write() -> bool:
            if self._system.exists(path):
                return False
            self._system.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._system.pipe_file(path, data)
            return True

        return in_time(self._address, write)

    def _names(self, path: str, kind: str) -> list[str]:
        def names() -> list[str]:
            self._system.invalidate_cache()
            try:
                found = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == kind
            )

        return in_time(self._address, names)
