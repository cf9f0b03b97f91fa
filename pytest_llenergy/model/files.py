# SPDX-License-Identifier: Apache-2.0
"""Files and pipes that people name or leave behind: with a limit of size, and without waiting for ever."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from pytest_llenergy.errors import ReportError

#: Largest file to read, local or remote. A report of ten thousand tests with twelve rounds each has 170 MB.
MAX_FILE_BYTES = 512 << 20

#: How long a pipe may have nobody at its other end, and how long a program there may be silent.
WRITER_TIMEOUT_S = READER_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 60.0

#: Time between two tries to open a pipe that no program reads yet.
RETRY_S = 0.02

#: Read at once if the size is unknown.
CHUNK_BYTES = 1 << 20


def read_limited(path: Path) -> bytes:
    """Read a file or a pipe.

    Raises:
        OSError: If it cannot be read, exceeds ``MAX_FILE_BYTES``, is neither a file nor a pipe, or is a pipe
            without data. ``strerror`` is the reason in words.
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
        if stat.S_ISFIFO(state.st_mode):
            return _read_pipe(file)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "a device or a socket; name a file")
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


def _read_pipe(file: IO[bytes]) -> bytes:
    """Read until the last writer has gone."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    data = bytearray()
    has_writer, since_s = False, time.monotonic()
    while True:
        # None if a writer has written nothing, and b"" if there is no writer, any more or yet.
        part: bytes | None = file.read(CHUNK_BYTES)
        if part:
            data += part
            _check_size(len(data))
            has_writer, since_s = True, time.monotonic()
            continue
        if part == b"" and has_writer:
            return bytes(data)
        has_writer = has_writer or part is None
        limit_s = SILENCE_TIMEOUT_S if has_writer else WRITER_TIMEOUT_S
        left_s = since_s + limit_s - time.monotonic()
        if left_s <= 0:
            fault = "nothing was written to" if has_writer else "no program has opened"
            raise OSError(errno.ETIMEDOUT, f"{fault} this pipe within {limit_s:g} s; start its writer")
        poll.poll(left_s * 1000)


def write_pipe(path: Path, data: bytes) -> None:
    """Write to a named pipe.

    Raises:
        OSError: If no program opens the pipe, or its reader stops. ``strerror`` is the reason in words.
    """
    deadline_s = time.monotonic() + READER_TIMEOUT_S
    descriptor = None
    while descriptor is None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() >= deadline_s:
                fault = f"no program has opened this pipe within {READER_TIMEOUT_S:g} s; start its reader"
                raise OSError(errno.ETIMEDOUT, fault) from None
            time.sleep(RETRY_S)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        rest = memoryview(data)
        while rest:
            if not poll.poll(SILENCE_TIMEOUT_S * 1000):
                raise OSError(errno.ETIMEDOUT, f"its reader took nothing for {SILENCE_TIMEOUT_S:g} s")
            rest = rest[file.write(rest) or 0 :]


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. Links are followed; a device or a pipe is written, never replaced.

    Raises:
        ReportError: If it cannot be written, or is a pipe that no program reads; an old file then remains.
    """
    try:
        if path.is_dir():
            raise ReportError(f"{path}: could not be written (Is a directory)")
        if path.is_fifo():
            write_pipe(path, content)
            return
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
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
