# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from pytest_llenergy.errors import ReportError


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
