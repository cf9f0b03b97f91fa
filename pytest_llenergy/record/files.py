# SPDX-License-Identifier: Apache-2.0
"""Files that people name or leave behind: with a limit of size, and nothing but files."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from pytest_llenergy.errors import ReportError

#: Largest file to read. A report of ten thousand tests with twelve rounds each has 170 MB.
MAX_FILE_BYTES = 512 << 20

#: Read at once if the size is unknown.
CHUNK_BYTES = 1 << 20


def read_limited(path: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: If it cannot be read, exceeds ``MAX_FILE_BYTES``, or is no file. ``strerror`` is the reason
            in words.
    """
    try:
        # Opening a pipe that has no writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "a device, pipe or socket; name a file")
        _check_size(state.st_size)
        parts = [file.read(state.st_size + 1)]
        while parts[-1]:  # the file may grow while it is read
            _check_size(sum(map(len, parts)))
            parts.append(file.read(CHUNK_BYTES))
        return b"".join(filter(None, parts))


def describe_limit() -> str:
    """Return what a message says of a file that is too large."""
    return f"larger than {MAX_FILE_BYTES >> 20} MiB, the limit; name a smaller file"


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"{size >> 20} MiB, {describe_limit()}")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. Links are followed.

    Raises:
        ReportError: If it cannot be written, or something else than a file has this name, which then remains.
    """
    try:
        if path.exists() and not path.is_file():
            what = "Is a directory" if path.is_dir() else "a device, pipe or socket; name a file"
            raise ReportError(f"{path}: could not be written ({what})")
        target = path.resolve()
        scratch = target.with_name(f".{target.name}-{token_hex(4)}")
        try:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise
    except OSError as error:
        raise ReportError(f"{path}: could not be written ({error.strerror})") from error
