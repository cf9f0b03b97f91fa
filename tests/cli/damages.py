# SPDX-License-Identifier: Apache-2.0
"""Ten ways in which a file is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


#: Each damages a file that has this content.
DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, _: path.unlink(),
    "empty": lambda path, _: path.write_bytes(b""),
    "cut": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "not UTF-8": lambda path, data: path.write_bytes(b"\xff\xfe" + data),
    "a list": lambda path, _: path.write_bytes(b"[]\n"),
    "another object": lambda path, _: path.write_bytes(b'{"schema_version": 1, "a": "\x1b[31m"}\n'),
    "newer": lambda path, _: path.write_bytes(b'{"schema_version": 999}\n'),
    "another page": lambda path, _: path.write_bytes(b"<!doctype html><title>404</title>\n"),
    "a directory": lambda path, _: _replace(path, Path.mkdir),
}


def restore(path: Path, data: bytes) -> None:
    """Put back what was there before a damage."""
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(data)
